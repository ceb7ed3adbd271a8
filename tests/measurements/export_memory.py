"""Measure the peak memory and the time of the export of a checkpoint that several ranks saved.

    python -m tests.measurements.export_memory [SIZE] [RANKS] [FOLDER]

SIZE is one of Llama's, 1b by default. The weights are random, and saved alone. The folder needs
room for them four times. Memory is the most that the process had resident (VmHWM), beside what it
has after the command's imports.
"""

import json
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

import torch

from tests.support.ranks import run_ranks
from torchmars.checkpoint.manifest import CheckpointManifest
from torchmars.checkpoint.saver import OwnedFolders, Saver
from torchmars.checkpoint.state_dict import model_state
from torchmars.cluster import connection
from torchmars.config import ResolvedConfig
from torchmars.config.load import config_from_tables
from torchmars.models import build_meta_model
from torchmars.optim.tensors import local_part
from torchmars.parallel.parallel_model import ParallelModel
from torchmars.records.events import EventLog

VOCABULARY = 128256
MEASURED = """
import json, sys, time
from pathlib import Path
from torchmars.commands import export
import tokenizers
peak = lambda: int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024
before, began = peak(), time.perf_counter()
export.main()
print(json.dumps([before, peak(), time.perf_counter() - began]))
"""


def config_of(size: str, folder: Path) -> ResolvedConfig:
    tables = {
        "run": {"name": "large", "folder": str(folder)},
        "model": {"name": "llama", "size": size, "vocab_size": VOCABULARY},
        "training": {"dtype": "float32"},
        "checkpoint": {"async_save": False},
    }
    return config_from_tables(tables, "in the benchmark")


def save(size: str, folder: Path) -> None:
    """Save a checkpoint of random weights. Called by every rank."""
    config = config_of(size, folder)
    layout = connection.start(config.parallelism)
    whole = build_meta_model(config.model, VOCABULARY, config.training.seq_len)
    model = ParallelModel(
        whole,
        config.parallelism,
        config.training,
        config.activation_checkpoint,
        layout,
        torch.device("cpu"),
    )
    torch.manual_seed(layout.world.rank)
    for weight in model.weights.values():
        torch.nn.init.uniform_(local_part(weight.detach()), -0.05, 0.05)
    manifest = CheckpointManifest(
        step=1,
        position=1,
        world_size=layout.world.size,
        data_fingerprint="",
        vocab_size=257,
        optimizer={},
        config=asdict(config),
    )
    events = EventLog(None)
    saver = Saver(config, layout, OwnedFolders(), events.add)
    saver.save(manifest, model_state(model.weights))
    saver.finish()


def measure(run: Path, target: Path, *options: str) -> tuple[int, int, float]:
    """Return the peak bytes of memory before and with an export, and its seconds."""
    command = [sys.executable, "-c", MEASURED, str(run), str(target), *options]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    before, peak, seconds = json.loads(out.splitlines()[-1])
    return before, peak, seconds


def main() -> None:
    size, ranks, place = [*sys.argv[1:], *["1b", "4", None][len(sys.argv) - 1 :]]
    with tempfile.TemporaryDirectory(dir=place) as name:
        folder = Path(name)
        began = time.perf_counter()
        run_ranks(save, int(ranks), size, folder)
        config = config_of(size, folder)
        model = build_meta_model(config.model, VOCABULARY, config.training.seq_len)
        sizes = [4 * parameter.numel() for parameter in model.parameters()]
        print(
            f"{sum(sizes) // 4:,} parameters, {ranks} ranks, saved in "
            f"{time.perf_counter() - began:.0f} s; largest tensor {max(sizes) / 2**20:,.0f} MiB\n"
            "| export | seconds | peak, MiB | beyond the start, MiB | and the largest tensor, MiB |"
            "\n|---|---|---|---|---|",
            flush=True,
        )
        for options in (("--dtype", "float32"), ("--dtype", "bfloat16")):
            target = folder / options[-1]
            before, peak, seconds = measure(config.run.path, target, *options)
            beyond = peak - before
            print(
                f"| {options[-1]} | {seconds:.0f} | {peak / 2**20:,.0f} | {beyond / 2**20:,.0f} "
                f"| {(beyond - max(sizes)) / 2**20:,.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
