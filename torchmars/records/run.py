"""A run as its folder tells it: config, curves, events."""

import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from torchmars.checkpoint.folder import checkpoints, folder_of, other_run, step_of
from torchmars.config.load import Tables, read_toml
from torchmars.core.check import make
from torchmars.core.console import say
from torchmars.core.errors import UserError
from torchmars.core.files import path_problem
from torchmars.core.places import local_place
from torchmars.records.events import EVENTS_FILE, Event, read_events
from torchmars.records.lines import (
    METRICS_FILE,
    Lines,
    Row,
    measurements,
    read_lines,
    warn_of_damage,
)

CONFIG_FILE = "config.toml"
LINES = "*.jsonl"  # its files of lines, in what is said of them
BITS = "validation/bits_per_byte"
TOKENS, SPEED, SKIPPED = "train/tokens", "train/tokens_per_second", "train/skipped_steps"


@dataclass(frozen=True)
class Series:
    """The values of one measurement over the steps of a run, NaN where one was not finite."""

    steps: NDArray[np.int64]
    values: NDArray[np.float64]


@dataclass(frozen=True, repr=False)
class Run:
    """The contents of a run's folder; nothing of it is changed."""

    folder: Path
    config: Tables
    """The tables of its config.toml."""

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r}: {self.last_step} of {self.steps} steps)"

    @property
    def name(self) -> str:
        """The name of its folder."""
        return self.folder.name

    @cached_property
    def rows(self) -> Lines[Row]:
        """The lines of metrics.jsonl, in their order."""
        return read_lines(self.folder / METRICS_FILE, measurements)

    @cached_property
    def series(self) -> dict[str, Series]:
        """Every measurement in metrics.jsonl, by name, such as train/loss."""
        found: dict[str, tuple[list[int], list[float | None]]] = {}
        for row in self.rows:
            for name, value in row.items():
                steps, values = found.setdefault(name, ([], []))
                steps.append(row["step"])
                values.append(value)
        found.pop("step", None)
        return {
            name: Series(np.array(steps, np.int64), np.array(values, np.float64))  # None is NaN
            for name, (steps, values) in found.items()
        }

    @cached_property
    def events(self) -> Lines[Event]:
        """Its events, oldest first; never forgotten."""
        return read_events(self.folder / EVENTS_FILE)

    def warn_of_damage(self) -> None:
        """Print how many lines of its metrics and events are left out, if any are."""
        warn_of_damage(self.folder / LINES, self.damaged)

    @property
    def damaged(self) -> int:
        """How many lines of its metrics and events are damaged, and left out."""
        return self.rows.damaged + self.events.damaged

    def finite(self, name: str) -> NDArray[np.float64]:
        """Return the finite values of a measurement, none where there is no such measurement."""
        values = self.series[name].values if name in self.series else np.empty(0)
        return values[np.isfinite(values)]

    @property
    def steps(self) -> int:
        """How many steps it is to have."""
        return int(self.config["training"]["steps"])

    @property
    def last_step(self) -> int:
        """The last step that it has reported, 0 without one."""
        return max((row["step"] for row in self.rows), default=0)

    @property
    def skipped(self) -> Series:
        """How many steps each report found skipped since the one before, where there were some."""
        counted = self.series.get(SKIPPED)
        if counted is None:
            return Series(np.zeros(0, dtype=np.int64), np.zeros(0))
        # Of a run that an earlier report counted more of, steps were made again.
        more = np.diff(counted.values, prepend=0.0)
        return Series(counted.steps[more > 0], more[more > 0])

    @property
    def checkpoints(self) -> list[int]:
        """The steps of which it has checkpoints, in order."""
        return [step_of(path) for path in checkpoints(folder_of(self.folder))]

    def tokens(self, steps: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the tokens that it had read after each of `steps`, linear between reports."""
        reported = self.series.get(TOKENS)
        if reported is None:
            training = self.config["training"]
            tokens_per_step = training["global_batch_size"] * training["seq_len"]
            return np.asarray(steps, np.float64) * tokens_per_step
        known = np.isfinite(reported.values)
        at = np.concatenate([[0], reported.steps[known]])
        values = np.concatenate([[0.0], reported.values[known]])
        return np.asarray(np.interp(steps, at, values), dtype=np.float64)


def read_run(folder: str | Path) -> Run:
    """Return the contents of a run's folder: its config, curves and events.

    Args:
        folder: the run's, FOLDER/NAME of its config.

    Returns:
        `run.series["train/loss"]` has the `steps` and `values` of a measurement, as arrays.

    Raises:
        UserError: where it is no run's folder, or its files are damaged.
    """
    folder = local_place(make(Path, folder, name="folder"), "the folder of a run")
    file = folder / CONFIG_FILE
    if not file.is_file():
        lacks = f"it has no {CONFIG_FILE}" if folder.exists() else "it does not exist"
        why = path_problem(folder, "folder") or lacks
        raise UserError(f"{folder} is not the folder of a run: {why}: {other_run(folder)}")
    config = read_toml(file)
    training = config.get("training")
    if not isinstance(training, dict) or type(training.get("steps")) is not int:
        raise UserError(f"{folder} is not the folder of a run: {file} has no training.steps")
    return Run(folder, config)


def read_runs(folders: list[Path]) -> list[Run]:
    """Return the contents of the folders of runs. Raises `UserError` as `read_run` does.

    Where some are of runs, those that have no config are left out, such as an export beside them.
    """
    runs = [folder for folder in folders if os.path.isfile(folder / CONFIG_FILE)]
    others = [each for each in folders if runs and each not in runs and os.path.exists(each)]
    for folder in others:
        say(f"left out {folder}: it has no {CONFIG_FILE}, so it is not the folder of a run")
    return [read_run(folder) for folder in folders if folder not in others]
