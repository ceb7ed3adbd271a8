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
from torchmars.config.load import config_from_tables

SIZES = sized(
    {
        "model": {"n_layer": 4, "n_head": 12, "n_embd": 768},
        "training": {"global_batch_size": 16, "seq_len": 512, "steps": 30},
    },
    {"model": {"n_layer": 1}, "training": {"global_batch_size": 2, "steps": 2}},
)


def rows(deterministic: bool) -> Iterator[dict[str, Any]]:
    """Yield how two runs ended, and what of them is the same."""
    with tempfile.TemporaryDirectory() as name:
        folder, found = Path(name), []
        write_text(folder, documents=400)
        for run in ("first", "second"):
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
            yield {"run": run, "deterministic": deterministic, **ended(start(file), 0)}
            found.append(trace_of(run_folder_of(tables)))
        (losses, weights), (again, weights_again) = found
        differ = [step for step, values in losses.items() if values != again.get(step)]
        yield {
            "deterministic": deterministic,
            "steps": len(losses),
            "first step whose numbers differ": min(differ, default=None),
            "same checkpoint": weights == weights_again,
        }


def trace_of(run: Path) -> tuple[dict[int, dict[str, float]], list[str]]:
    """Return the loss and gradient norm of each step, and sums of the files of weights."""
    numbers: dict[int, dict[str, float]] = {}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        values = json.loads(line)
        numbers[values["step"]] = {
            name: values[name] for name in ("train/loss", "train/grad_norm") if name in values
        }
    files = sorted((run / "checkpoints").glob("step-*/*.distcp"))
    return numbers, [hashlib.sha256(each.read_bytes()).hexdigest() for each in files]
