"""How long it takes to read and to list long runs.

`python -m tests.measurements.read_runs [RUNS] [ROWS]`: 20 runs of 100,000 rows by default, in a
temporary folder.
"""

import json
import random
import sys
import tempfile
import time
from pathlib import Path

from torchmars.records.overview import find_runs, overview
from torchmars.records.run import read_run

ROLES, NUMBERS = ("embedding", "vector", "matrix"), ("grad_norm", "momentum", "clipped", "cosine")
PHASES = ("data", "forward", "backward", "reduce", "optimizer", "other")
NAMES = [
    *("train/loss", "train/lr", "train/tokens", "train/tokens_per_second", "train/memory_gib"),
    *("train/grad_norm", "train/skipped_steps"),
    *(f"train/{role}/{number}" for role in ROLES for number in NUMBERS),
    *(f"train/{phase}_ms" for phase in PHASES),
]


def write_run(folder: Path, rows: int) -> None:
    folder.mkdir()
    (folder / "config.toml").write_text(f"[training]\nsteps = {rows}\n")
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, rows + 1):
            values = {name: random.random() for name in NAMES}
            file.write(json.dumps({"step": step} | values) + "\n")
            if step % 100 == 0:
                file.write(json.dumps({"step": step, "validation/loss": 3.0}) + "\n")


def main() -> None:
    count, rows = (int(word) for word in [*sys.argv[1:], *("20", "100000")[len(sys.argv) - 1 :]])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_run(folder / "run-0", rows)
        for number in range(1, count):
            (folder / f"run-{number}").symlink_to(folder / "run-0")
        began, used = time.perf_counter(), time.process_time()
        listed = [overview(run) for run in find_runs(folder)]
        print(f"listed {len(listed)} runs: {time.perf_counter() - began:.2f} s")
        for what in ("first", "all"):
            began, used = time.perf_counter(), time.process_time()
            for run in find_runs(folder)[: 1 if what == "first" else count]:
                assert len(read_run(run).series["train/loss"].steps) == rows
            seconds, cpu = time.perf_counter() - began, time.process_time() - used
            print(f"read {what}: {seconds:.2f} s, {cpu:.2f} s of them on a CPU")


if __name__ == "__main__":
    main()
