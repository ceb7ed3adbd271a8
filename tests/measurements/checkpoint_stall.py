"""Measure what a save costs a run of GPT-2 small: the time that training waits, and memory.

    python -m tests.measurements.checkpoint_stall [FOLDER]

It makes four runs, one after the other: without checkpoints, with asynchronous ones on the disk and
in an object store (moto's server on the loopback), and with synchronous ones. Windows are short, so
that a step takes a second or two. Peak memory is that of the process, read before the final save.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.support.store import BUCKET, ServerProcess, variables
from tests.support.tiny import run_folder_of, tiny_tables, write_config, write_text
from torchmars.config.load import config_from_tables

STEPS, INTERVAL = 12, 3
KINDS = {
    "no checkpoints": {"interval": 0},
    "asynchronous": {"interval": INTERVAL},
    "asynchronous, in a store": {"interval": INTERVAL, "folder": f"s3://{BUCKET}/run"},
    "synchronous": {"interval": INTERVAL, "async_save": False},
}


def measure(folder: Path, kind: str) -> dict[str, float]:
    """One run in a process of its own: medians over its saves and steps."""
    tables = tiny_tables(
        folder,
        run={"name": kind.replace(",", "").replace(" ", "-")},
        model={"size": "small", "n_layer": 12, "n_head": 12, "n_embd": 768, "vocab_size": 50304},
        training={"steps": STEPS, "global_batch_size": 4, "seq_len": 64},
        checkpoint=KINDS[kind] | {"keep_last": 1},
    )
    file = folder / f"{tables['run']['name']}.toml"
    write_config(config_from_tables(tables, "in the benchmark"), file)
    subprocess.run(
        [sys.executable, "-m", "torchmars.train", str(file)],
        check=True,
        stdout=subprocess.DEVNULL,
        env=os.environ,
    )
    lines = [
        json.loads(line)
        for line in (run_folder_of(tables) / "metrics.jsonl").read_text().splitlines()
    ]
    train = {line["step"]: line for line in lines if "train/loss" in line}
    seconds = {
        step: 4 * 64 / line["train/tokens_per_second"] for step, line in train.items() if step > 1
    }
    stalls = [
        line["checkpoint/stall_ms"] / 1e3
        for line in lines
        if "checkpoint/stall_ms" in line and line["step"] < STEPS
    ]
    after = [seconds[step] for step in seconds if step % INTERVAL == 1]
    return {
        "step": statistics.median(seconds.values()),
        "after": statistics.median(after),
        "memory": train[STEPS]["train/memory_gib"],
        "stall": statistics.median(stalls) if stalls else 0.0,
        "first": stalls[0] if stalls else 0.0,
    }


def main() -> None:
    parent = sys.argv[1] if len(sys.argv) > 1 else None
    with tempfile.TemporaryDirectory(dir=parent) as name, ServerProcess() as server:
        folder = Path(name)
        os.environ |= {"TMPDIR": name} | variables(server.address)  # the server keeps files too
        write_text(folder)
        print(
            "| run | stall, first save, s | stall, later, s | step, s | step after a save, s "
            "| peak memory, GiB |\n|---|---|---|---|---|---|",
            flush=True,
        )
        for kind in KINDS:
            figures = measure(folder, kind)
            print(
                f"| {kind} | {figures['first']:.2f} | {figures['stall']:.2f} "
                f"| {figures['step']:.2f} | {figures['after']:.2f} | {figures['memory']:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
