"""A run small enough for tests: its config, its text, and training it on any number of ranks."""

import contextlib
import gc
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.support.ranks import run_ranks
from torchmars.checkpoint.folder import checkpoints, step_of
from torchmars.cluster import connection, process
from torchmars.config import ResolvedConfig
from torchmars.config.load import config_from_tables, config_text
from torchmars.core.errors import UserError
from torchmars.training.build import build_trainer
from torchmars.training.trainer import Trainer

Change = Callable[[Trainer], None]


def set_bfloat16(native: bool, patch: pytest.MonkeyPatch) -> None:
    """Let torch say that this process's CPU has instructions for bfloat16, or has none."""
    patch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    patch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": native})
    patch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: native)


def write_text(folder: Path, documents: int = 40, words: int = 300) -> Path:
    """Write a text file of `documents` documents of made-up but regular prose; return its path."""
    text = []
    for document in range(documents):
        sentences = (
            f"The {('red', 'old', 'small')[(document + n) % 3]} fox "
            f"number {document * n % 97} went over the hill. "
            for n in range(words // 10)
        )
        text.append("".join(sentences))
    file = folder / "text.txt"
    file.write_text("\n<|endoftext|>\n".join(text))
    return file


def tiny_tables(folder: Path, **overrides: dict) -> dict[str, dict]:
    """Return the tables of a tiny config whose run, text and shards lie in `folder`.

    `overrides` replace keys of sections.
    """
    tables = {
        "run": {"name": "tiny", "folder": str(folder / "runs")},
        "model": {"n_layer": 2, "n_head": 2, "n_embd": 32},
        "data": {
            "source": "text",
            "files": [str(folder / "text.txt")],
            "path": str(folder / "shards"),
            "validation_fraction": 0.05,
        },
        "training": {"steps": 20, "global_batch_size": 16, "seq_len": 32},
        "optimizer": {"name": "mars-adamw"},
        "schedule": {"warmup_steps": 5},
        "checkpoint": {"interval": 0},
        "validation": {"interval": 0},
        "metrics": {"log_interval": 1},
    }
    for section, table in overrides.items():
        tables[section] = tables.get(section, {}) | table
    return tables


def tiny_config(folder: Path, **overrides: dict) -> ResolvedConfig:
    """Return the config that `tiny_tables` describes."""
    return config_from_tables(tiny_tables(folder, **overrides), "in a test")


def train_here(*runs: dict[str, dict], change: Change = lambda trainer: None) -> None:
    """Train runs, given as tables, one after the other on the ranks of this process group.

    `change` changes each trainer before it runs, its storage or its clock for example.
    """
    for tables in runs:
        gc.freeze()  # as tests.support.warm does: the end of the run before has undone it
        config = config_from_tables(tables, "in a test")
        trainer = build_trainer(config, connection.start(config.parallelism))
        change(trainer)
        trainer.run()


class AtReport:
    """A tracker that acts when the first rank has reported step number `step`."""

    def __init__(self, step: int, act: Callable[[], None]) -> None:
        self.step, self.act = step, act

    def write(self, step: int, values: dict[str, float]) -> None:
        """Act, if it is that step."""
        if step == self.step:
            self.act()

    def close(self) -> None:
        """Do nothing."""


def write_config(config: ResolvedConfig, path: Path) -> None:
    """Write a config file for a command."""
    path.write_text(config_text(config), encoding="utf-8")


def listen_here(tables: dict[str, dict], change: Change = lambda trainer: None) -> str:
    """Train as `train_here` does; return what this rank printed.

    The message of a `UserError` is the last line.
    """
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            train_here(tables, change=change)
        except UserError as error:
            print(f"error: {error}")
    return out.getvalue()


def listen(size: int, tables: dict[str, dict]) -> str:
    """Train the run of `tables` on `size` ranks; return what the first one printed."""
    return run_ranks(listen_here, size, tables)[0]


def listen_on(native: list[bool], *runs: dict[str, dict]) -> list[str]:
    """Train runs on ranks whose CPUs have `native` instructions for bfloat16, or none.

    Returns what the first rank printed of each.
    """
    return run_ranks(_listen_on, len(native), native, *runs)[0]


def _listen_on(native: list[bool], *runs: dict[str, dict]) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        set_bfloat16(native[process.rank()], patch)
        return [listen_here(tables) for tables in runs]


def train(size: int, *runs: dict[str, dict]) -> None:
    """Train runs, given as tables, one after the other on `size` ranks."""
    run_ranks(train_here, size, *runs)


def run_folder_of(tables: dict[str, dict]) -> Path:
    """Return the folder of the run that `tables` describe."""
    return Path(tables["run"]["folder"]) / tables["run"]["name"]


def metrics(tables: dict[str, dict], name: str = "train/loss") -> dict[int, float]:
    """Return what the run of `tables` reported under `name`, by step."""
    lines = [
        json.loads(line)
        for line in (run_folder_of(tables) / "metrics.jsonl").read_text().splitlines()
    ]
    return {line["step"]: line[name] for line in lines if name in line}


def steps_kept(tables: dict[str, dict]) -> list[int]:
    """Return the steps of the checkpoints that the run of `tables` has."""
    return [step_of(path) for path in checkpoints(run_folder_of(tables) / "checkpoints")]


def copy_run(source, target, keep_until):
    """Copy `source` without its checkpoints after step `keep_until`: a run that was stopped."""
    shutil.copytree(run_folder_of(source), run_folder_of(target))
    for folder in (run_folder_of(target) / "checkpoints").iterdir():
        if int(folder.name[5:]) > keep_until:
            shutil.rmtree(folder)


def same(expected, actual, tolerance):
    """Assert that two runs have reported the same values at the same steps."""
    assert list(actual) == list(expected)
    assert all(
        actual[step] == pytest.approx(expected[step], rel=tolerance, abs=0) for step in expected
    )
