"""A run as its folder tells it: config, curves, events."""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchmars.checkpoint.folder import checkpoints, step_of
from torchmars.config.toml_files import Tables, read_toml
from torchmars.core.errors import UserError
from torchmars.core.files import path_problem
from torchmars.metrics.events import EVENTS_FILE, Event, read_events

TOKENS, SPEED = "train/tokens", "train/tokens_per_second"


@dataclass(frozen=True)
class Series:
    """The values of one measurement over the steps of a run, NaN where one was not finite."""

    steps: NDArray[np.int64]
    values: NDArray[np.float64]


@dataclass(frozen=True)
class Run:
    """What the folder of a run holds; nothing of it is changed."""

    folder: Path
    config: Tables
    """The tables of its config.toml."""

    @property
    def name(self) -> str:
        """Its name, which is that of its folder."""
        return self.folder.name

    @cached_property
    def series(self) -> dict[str, Series]:
        """Every measurement in metrics.jsonl, by name, such as train/loss."""
        found: dict[str, tuple[list[int], list[float]]] = {}
        for row in read_rows(self.folder / "metrics.jsonl"):
            step = row.pop("step", None)
            if not isinstance(step, int):
                continue
            for name, value in row.items():
                if value is None or isinstance(value, int | float):
                    steps, values = found.setdefault(name, ([], []))
                    steps.append(step)
                    values.append(float("nan") if value is None else float(value))
        return {
            name: Series(np.array(steps, dtype=np.int64), np.array(values, dtype=np.float64))
            for name, (steps, values) in found.items()
        }

    @cached_property
    def events(self) -> list[Event]:
        """What happened to it, oldest first; never forgotten, also not by a rollback."""
        return read_events(self.folder / EVENTS_FILE)

    @property
    def checkpoints(self) -> list[int]:
        """The steps of which it has checkpoints, in order."""
        return [step_of(path) for path in checkpoints(self.folder / "checkpoints")]

    def tokens(self, steps: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the tokens that it had read after each of `steps`, linear between reports."""
        reported = self.series.get(TOKENS)
        if reported is None:
            training = self.config["training"]
            return steps.astype(np.float64) * (training["global_batch_size"] * training["seq_len"])
        return interpolated(steps, reported.steps, reported.values)

    def seconds(self, steps: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the seconds of training until each of `steps`, over all its starts.

        They are the tokens of each report over the tokens per second in it: without validations,
        saves and the time in which it was stopped.
        """
        speed = self.series.get(SPEED)
        if speed is None:
            return np.zeros(len(steps))
        read = np.diff(self.tokens(speed.steps), prepend=0.0)
        return interpolated(steps, speed.steps, np.cumsum(read / speed.values))


def interpolated(
    steps: NDArray[np.int64], known: NDArray[np.int64], values: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return `values`, which are 0 at step 0, at `steps` in place of `known` ones."""
    result = np.interp(steps, np.concatenate([[0], known]), np.concatenate([[0.0], values]))
    return np.asarray(result, dtype=np.float64)


def read_run(folder: Path) -> Run:
    """Return the run in `folder`. Raises `UserError` if there is none, or its files are damaged."""
    if not (folder / "config.toml").is_file():
        why = path_problem(folder, "folder") or "it has no config.toml"
        raise UserError(f"{folder} is not the folder of a run: {why}")
    return Run(folder, read_toml(folder / "config.toml"))


def read_rows(file: Path) -> list[dict[str, Any]]:
    """Return the objects in the lines of a file of JSON lines, without what a crash cut short."""
    if not file.exists():
        return []
    rows = []
    with file.open(encoding="utf-8", errors="replace") as stream:
        for line in stream:
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict):
                rows.append(row)
    return rows
