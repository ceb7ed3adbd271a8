"""What copies in memory and checkpoints cost a run on a GPU."""

import json
import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.gpu.device import sized
from tests.gpu.runs import ended, start
from tests.support.tiny import run_folder_of, tiny_tables, write_config, write_text
from torchmars.config.load import config_from_tables

SIZES = sized(
    {
        "model": {"n_layer": 12, "n_head": 12, "n_embd": 768},
        "training": {"global_batch_size": 16, "seq_len": 1024, "steps": 240},
        "metrics": {"log_interval": 40},
    },
    {
        "model": {"n_layer": 1},
        "training": {"global_batch_size": 2, "steps": 6},
        "metrics": {"log_interval": 2},
    },
)
RUNS = {
    "neither": {"interval": 0},
    "a copy in memory, every step": {"interval": 0, "memory_interval": 1},
    "a copy in memory, every 10 steps": {"interval": 0, "memory_interval": 10},
    "a checkpoint, every 40 steps": {"interval": SIZES["metrics"]["log_interval"]},
}


def rows() -> Iterator[dict[str, Any]]:
    """Yield the time of a step of runs that keep copies, save checkpoints, and do neither."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_text(folder, documents=400)
        for number, (run, checkpoint) in enumerate(RUNS.items()):
            tables = tiny_tables(
                folder,
                run={"name": f"run-{number}"},
                checkpoint={"at_end": False} | checkpoint,
                validation={"interval": 0},
                **SIZES,
            )
            file = folder / f"run-{number}.toml"
            write_config(config_from_tables(tables, "of this measurement"), file)
            process = start(file)
            seen = [(int(step), at) for step, at in steps_of(process)]
            (first, began), (last, done) = seen[len(seen) // 2], seen[-1]
            yield {
                "run": run,
                "step, ms": 1e3 * (done - began) / (last - first),
                "stalls, ms": stalls(run_folder_of(tables) / "metrics.jsonl"),
                **ended(process, 0),
            }


def steps_of(process: Any) -> Iterator[tuple[str, float]]:
    """Yield each step that a run prints, and when it does."""
    for line in process.stdout:
        if found := re.match(r"step +([\d,]+)/", line):
            yield found[1].replace(",", ""), time.monotonic()


def stalls(metrics: Path) -> list[float]:
    """Return for how long training waited at the saves of a run."""
    found = map(json.loads, metrics.read_text().splitlines())
    return [row["checkpoint/stall_ms"] for row in found if "checkpoint/stall_ms" in row]
