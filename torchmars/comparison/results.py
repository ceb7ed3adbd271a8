"""The results of a comparison, and its file results.json.

They are the same, byte for byte, however often the comparison was stopped and continued.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from torchmars.core.check import make, parse_json
from torchmars.core.errors import UserError
from torchmars.core.files import path_problem, read_text, write_durably

RESULTS_FILE = "results.json"

# The settings of a grid point by name: lr, weight_decay, gamma, betas.
Value = float | list[float]
Settings = dict[str, Value]
Grid = dict[str, list[Value]]
Edges = dict[str, Literal["lowest", "highest"]]
State = Literal["done", "failed", "diverged", "pending"]
Kind = Literal["optimizer", "size"]


@dataclass(frozen=True)
class LossCurve:
    """The validation losses of a trial, in order. The lists are of the same length."""

    tokens: list[float]
    """Tokens read until then."""
    losses: list[float | None]
    """Loss in nats per token, None if it was not finite."""


@dataclass(frozen=True)
class TrialResult:
    """One run of a comparison: a row of its table."""

    name: str
    contender: str
    settings: Settings
    """Its values of the grid."""
    seed: int
    state: State
    """pending: it has not ended yet."""
    reason: str
    """Why it failed or diverged, in a line; else empty."""
    loss: float | None
    """Validation loss after the last step of a trial that is done."""
    curve: LossCurve
    folder: str
    """Folder of the run, relative to the comparison's."""


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds with its 95% interval. The ends are None if one seed alone is known."""

    mean: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class ContenderResult:
    """A contender of a comparison, with the settings that are best for it."""

    name: str
    rule: str
    """Its optimizer.name."""
    best: Settings | None
    """The settings of the lowest loss with the first seed; None if no trial is done."""
    edges: Edges
    """The settings whose best value is the outermost of three or more, or of two of lr, and at
    which end; of betas betas[0] and betas[1]."""
    losses: list[float]
    """Final losses of the best settings, by seed, of the trials that are done."""
    mean: float | None
    """Mean of `losses`."""
    spread: float | None
    """Standard deviation of `losses` over the seeds; None for fewer than two."""
    tokens_saved: Estimate | None
    """Share of the baseline's tokens that it does not need for the baseline's final loss: 0.2 means
    20% fewer tokens, a negative number more. None if it is not known."""
    remark: str
    """Why no savings are known, such as that it never reaches the baseline's loss; else empty."""


@dataclass(frozen=True)
class Difference:
    """The difference between the final losses of two contenders' best settings."""

    first: str
    second: str
    loss: Estimate
    """Mean of the first minus mean of the second, with Welch's interval."""
    shown: bool
    """Whether the interval is on one side of 0. One seed alone has no interval, and shows none."""


@dataclass(frozen=True)
class Comparison:
    """All that a comparison has found so far."""

    name: str
    config: list[str]
    """The config files and options that all trials share, as given on the command line."""
    grid: Grid
    """The values that are tried of each setting, by name, before any widening."""
    seeds: list[int]
    steps: int
    """Steps of each trial."""
    tokens: int
    """Tokens that each trial reads."""
    baseline: str | None
    """The contender that savings and differences are measured against; None for none."""
    contenders: list[ContenderResult]
    """The best first; those without a result last."""
    differences: list[Difference]
    """Of each pair of contenders: another minus the baseline first, then better minus worse."""
    trials: list[TrialResult]
    """In the order of contenders on the command line, settings, seeds."""
    kind: Kind
    """What contenders are: optimizers, or sizes of a model, of which the first is the base."""

    @property
    def names(self) -> list[str]:
        """The names of contenders, in the order of trials."""
        return list(dict.fromkeys(each.contender for each in self.trials))

    @property
    def tuned(self) -> list[str]:
        """The settings that a reader is told of each trial: all have the same of the others."""
        return [name for name, values in self.grid.items() if name == "lr" or len(values) > 1]

    def place_of(self, contender: ContenderResult) -> int:
        """Return the place of a contender on the command line, from 0. It has its color by that."""
        return self.names.index(contender.name)

    def trials_of(self, contender: ContenderResult) -> list[TrialResult]:
        """Return the trials of a contender's best settings, one for each seed that was run."""
        return [
            each
            for each in self.trials
            if each.contender == contender.name and each.settings == contender.best
        ]


def numbers_of(value: Value) -> list[float]:
    """Return the numbers of a setting's value."""
    return value if isinstance(value, list) else [value]


def rate_of(settings: Settings) -> float:
    """Return the learning rate among the settings of a trial."""
    lr = settings["lr"]
    assert isinstance(lr, float)
    return lr


def write_comparison(found: Comparison, folder: Path) -> None:
    """Write results.json to the folder of a comparison."""
    write_durably(folder / RESULTS_FILE, json.dumps(asdict(found), indent=1) + "\n")


def read_comparison(folder: Path) -> Comparison:
    """Return the results in the folder of a comparison.

    Raises `UserError` if there are none, or they are damaged.
    """
    file = folder / RESULTS_FILE
    try:
        return make(Comparison, parse_json(read_text(file)), f"in {file}")
    except OSError as error:
        why = path_problem(folder, "folder") or f"{RESULTS_FILE}: {error.strerror}"
        raise UserError(f"{folder} is not the folder of a comparison: {why}") from None
    except ValueError as error:
        raise UserError(f"{file} is damaged: {error}") from None
