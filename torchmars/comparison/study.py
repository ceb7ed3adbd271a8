"""A study: contenders, grid and seeds, and the trials that follow from them."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar, Literal

from torchmars.comparison.contenders import Contender
from torchmars.comparison.results import Edges, Grid, Kind, Settings, TrialResult, Value, numbers_of
from torchmars.config import ResolvedConfig
from torchmars.config.load import config_from_tables
from torchmars.core.errors import UserError
from torchmars.optim.rules import RULES

SHORT_NAMES = {"weight_decay": "wd"}  # of settings, in the names of trials
MOST_WIDENINGS = 4  # learning rates that are added at each end of a grid


@dataclass(frozen=True)
class Trial:
    """A run that belongs to a comparison."""

    name: str
    contender: str
    settings: Settings
    """Its values of the grid."""
    config: ResolvedConfig

    @property
    def folder(self) -> Path:
        """The folder of its run."""
        return self.config.run.path


@dataclass(frozen=True)
class Study:
    """The contenders, and how they are compared."""

    kind: ClassVar[Kind] = "optimizer"
    """What the contenders are."""
    seed_trials: ClassVar[int] = 1
    """How many trials each other seed gets."""

    folder: Path
    arguments: list[str]
    """The config files and options that all trials share."""
    base: ResolvedConfig
    """The config that these make. Its [optimizer] is not used."""
    contenders: list[Contender]
    grid: Grid
    """The values of each setting that is tuned, in ascending order; lr first."""
    seeds: list[int]
    """The first one is for tuning."""
    baseline: str | None
    """The contender that the others are measured against; None for none."""
    widen: bool
    """Whether to try learning rates beyond the grid where the best one lies at its edge."""
    keep_checkpoints: bool
    """Whether the last checkpoints of trials that are done are kept."""

    def trial(self, contender: Contender, settings: Settings, seed: int) -> Trial:
        """Return a trial. Raises `UserError` if its settings do not go together."""
        parts = [
            f"{SHORT_NAMES.get(name, name)}{text_of(value)}" for name, value in settings.items()
        ]
        name = "-".join([contender.name, *parts, f"seed{seed}"])
        tables = asdict(self.base) | contender.sections
        tables["run"] |= {"name": name, "folder": str(self.folder / "trials"), "seed": seed}
        tables["optimizer"] = contender.table | settings
        tables["validation"]["sample_tokens"] = 0
        tables["checkpoint"]["at_end"] = self.keep_checkpoints
        return Trial(name, contender.name, settings, config_from_tables(tables, f"trial {name}"))

    @property
    def lrs(self) -> list[float]:
        """The learning rates of the grid."""
        return [value for value in self.grid["lr"] if isinstance(value, float)]

    def tuning(self, contender: Contender, lrs: Sequence[Value]) -> list[Trial]:
        """Return the trials of a contender's grid, with these learning rates."""
        grid = self.grid | {"lr": list(lrs)}
        known = RULES[contender.rule].defaults if contender.rule in RULES else grid
        grid = {name: values for name, values in grid.items() if name in known}
        points = [dict(zip(grid, values)) for values in itertools.product(*grid.values())]
        return [self.trial(contender, point, self.seeds[0]) for point in points]

    def plan(self, contender: Contender, result: Callable[[Trial], TrialResult]) -> "TrialPlan":
        """Return the trials of a contender, as far as the `result` of each tells.

        First the grid, then beyond it, one learning rate after the other. Once all of them have
        ended, the best settings follow with the other seeds.
        """
        lrs = self.lrs
        while True:
            trials = self.tuning(contender, lrs)
            results = [result(trial) for trial in trials]
            if any(each.state == "pending" for each in results):
                return TrialPlan(trials, False, None, {})
            done = [each for each in results if each.state == "done"]
            best = min(done, key=lambda each: each.loss or 0.0, default=None)  # the first of equals
            if best is None:
                return TrialPlan(trials, True, None, {})
            edges = edges_of(best.settings, self.grid | {"lr": list(lrs)})
            wider = self.wider(contender, lrs, edges.get("lr")) if self.widen else None
            if wider is None:
                repeated = self.repeated(best.settings, lrs)
                others = [
                    self.trial(contender, settings, seed)
                    for seed in self.seeds[1:]
                    for settings in repeated
                ]
                return TrialPlan([*trials, *others], True, best.settings, edges)
            lrs = wider

    def repeated(self, best: Settings, lrs: list[float]) -> list[Settings]:
        """Return the settings that the other seeds get, of those tried with these rates."""
        return [best]

    def wider(
        self, contender: Contender, lrs: list[float], edge: Literal["lowest", "highest"] | None
    ) -> list[float] | None:
        """Return learning rates with one more at an edge; None if there is none to add."""
        below = lrs.index(self.lrs[0])
        above = len(lrs) - below - len(self.lrs)
        if edge == "highest" and above < MOST_WIDENINGS:
            beyond = lrs[-1] * lrs[-1] / lrs[-2]
        elif edge == "lowest" and below < MOST_WIDENINGS:
            beyond = lrs[0] * lrs[0] / lrs[1]
        else:
            return None
        wider = sorted([*lrs, float(f"{beyond:.6g}")])
        try:
            self.tuning(contender, wider)
        except UserError:  # below schedule.min_lr, for one
            return None
        return wider


@dataclass(frozen=True)
class TrialPlan:
    """The trials of a contender, as far as they are known."""

    trials: list[Trial]
    tuned: bool
    """Whether all trials with the first seed have ended."""
    best: Settings | None
    """The best settings, once it is tuned; None if no trial is done."""
    edges: Edges
    """The best settings that are the outermost ones tried."""


def edges_of(best: Settings, grid: Grid) -> Edges:
    """Return which numbers of the best settings are the outermost of those that were tried.

    Each of the betas is one by itself. A lowest one of 0 is no edge: nothing lies beyond it. Of two
    values each is at an edge, which tells nothing: only lr counts then, which can be widened.
    """
    edges: Edges = {}
    for name, value in best.items():
        least = 2 if name == "lr" else 3
        for place, number in enumerate(numbers_of(value)):
            tried = {numbers_of(each)[place] for each in grid[name]}
            if len(tried) >= least and number and number in (min(tried), max(tried)):
                key = f"{name}[{place}]" if isinstance(value, list) else name
                edges[key] = "lowest" if number == min(tried) else "highest"
    return edges


def text_of(value: Value) -> str:
    """Return a value as the names of trials have it."""
    return "-".join(f"{each:.12g}" for each in numbers_of(value))
