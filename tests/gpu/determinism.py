"""Whether the same run twice gives the same bits, with training.deterministic and without."""

import hashlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.gpu.device import sized
from tests.gpu.runs import ended, start
from tests.support.tiny import run_folder_of, tiny_tables, write_config, write_text
from torchmars.checkpoint.folder import checkpoints
from torchmars.config.load import config_from_tables

SIZES = sized(
    {
        "model": {"n_layer": 4, "n_head": 12, "n_embd": 768},
        "training": {"global_batch_size": 16, "seq_len": 512, "steps": 60},
    },
    {"model": {"n_layer": 1}, "training": {"global_batch_size": 2, "steps": 2}},
)


def rows(deterministic: bool) -> Iterator[dict[str, Any]]:
    """Yield how two runs ended and a stopped and resumed one, and what of them is the same."""
    with tempfile.TemporaryDirectory() as name:
        folder, found = Path(name), []
        write_text(folder, documents=400)
        for run in ("first", "second", "stopped"):
            training = {"deterministic": deterministic, **SIZES["training"]}
            tables = tiny_tables(
                folder,
                run={"name": run},
                model=SIZES["model"],
                training=training,
                checkpoint={"interval": training["steps"]},
            )
            file = folder / f"{run}.toml"
            write_config(config_from_tables(tables, "of this measurement"), file)
            names = {"run": run, "deterministic": deterministic}
            if run == "stopped":
                half = str(training["steps"] // 2)
                yield {**names, **ended(start(file, "--training.stop_after", half), 0)}
            yield {**names, **ended(start(file), 0)}
            found.append(trace_of(run_folder_of(tables)))
        (losses, weights), *others = found
        for run, (again, weights_again) in zip(("second", "stopped"), others, strict=True):
            differ = [step for step, values in losses.items() if values != again.get(step)]
            yield {
                "deterministic": deterministic,
                "run": run,
                "steps": len(losses),
                "first step whose numbers differ": min(differ, default=None),
                "same checkpoint": weights == weights_again,
            }


def trace_of(run: Path) -> tuple[dict[int, dict[str, float]], list[str]]:
    """Return the loss and gradient norm of each step, and sums of the last files of weights."""
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    numbers = {
        row["step"]: {name: row[name] for name in ("train/loss", "train/grad_norm")}
        for row in rows
        if "train/loss" in row
    }
    files = sorted(checkpoints(run / "checkpoints")[-1].glob("*.distcp"))
    return numbers, [hashlib.sha256(each.read_bytes()).hexdigest() for each in files]
