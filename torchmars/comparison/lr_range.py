"""A learning rate range test: one short run whose learning rate rises at each step.

L. N. Smith, Cyclical Learning Rates for Training Neural Networks (arXiv 1506.01186).
"""

import json
import math
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torchmars.benchmark.measure import fail, short_run, train_in
from torchmars.config import ResolvedConfig
from torchmars.config.optimizer import GROUPS, ResolvedOptimizer
from torchmars.core.errors import EXIT_MISTAKE, UserError
from torchmars.metrics.journal import METRICS_FILE
from torchmars.training.preparation import prepare_run

SMOOTHING = 0.9  # at most: share of the losses before in the smoothed loss
SPAN = 0.05  # share of the test's losses that the smoothed loss is a mean of, or less
DIVERGED = 1.1  # a smoothed loss this many times the lowest has diverged
FEWEST = 10  # steps that tell anything
NEAR = 1.02  # a smoothed loss this many times the lowest is as good: noise alone does as much


@dataclass(frozen=True)
class LrRange:
    """The results of a range test, all for the learning rate of the matrices (optimizer.lr)."""

    lrs: list[float]
    losses: list[float]
    """The training loss of the batch at each rate."""
    smoothed: list[float]
    """Their mean over the last rates, of which older ones count less."""
    lowest: float
    """The rate at which the smoothed loss is lowest."""
    enough: float
    """The lowest rate whose smoothed loss is within 2% of the lowest one."""
    diverges: float | None
    """The first rate whose smoothed loss is 10% above its lowest, or whose loss is not finite; None
    if there is none."""

    def grid(self) -> list[float]:
        """Return rates to compare: about `enough`, each twice the one before.

        Those up to `lowest` could all be too high: a loss that falls no more stays where it is over
        a decade or two of rates, and noise says where in them it is lowest. The highest is half of
        the one that diverges, or less.
        """
        highest = min(2 * self.enough, (self.diverges or math.inf) / 2)
        return [highest / 2.0**halvings for halvings in (3, 2, 1, 0)]


def find_lr(config: ResolvedConfig, low: float, high: float, steps: int, ranks: int) -> LrRange:
    """Train `steps` steps whose optimizer.lr rises from `low` to `high`; return the findings.

    The learning rates of all groups keep their ratios. Raises `UserError` for what ends the run at
    its start.
    """
    with tempfile.TemporaryDirectory(prefix="torchmars-lr-find-") as scratch:
        folder = Path(scratch)
        config = rising_run(config, low, high, steps, folder)
        prepare_run(config, ranks, 1)
        code, printed = train_in(folder, config, ranks)
        lrs, losses, end = read_losses(config.run.path / METRICS_FILE)
        # A run that has diverged may end before its last step.
        if code and not (code == EXIT_MISTAKE and len(losses) >= FEWEST):
            fail(code, printed)
    if len(losses) < FEWEST:
        raise UserError(
            f"the loss was finite at {len(losses)} rates only: lower --low, or give more --steps"
        )
    return describe_range(lrs, losses, end)


def rising_run(
    config: ResolvedConfig, low: float, high: float, steps: int, folder: Path
) -> ResolvedConfig:
    """Return the config of the range test in `folder`."""
    short = short_run(config, warmup=0, steps=steps, folder=folder)
    return replace(
        short,
        optimizer=with_lr(config.optimizer, high),
        schedule=replace(short.schedule, name="range_test", min_lr=low, warmup_steps=0),
        guards=replace(short.guards, loss_spike="off"),
        metrics=replace(short.metrics, log_interval=1),
    )


def with_lr(section: ResolvedOptimizer, lr: float) -> ResolvedOptimizer:
    """Return the section with another optimizer.lr. All other rates keep their ratio to it."""
    factor = lr / section.lr

    def scaled(given: Any) -> Any:
        return given if given.lr is None else replace(given, lr=given.lr * factor)

    changed: dict[str, Any] = {name: scaled(getattr(section, name)) for name in GROUPS}
    changed |= {"lr": lr, "groups": [scaled(group) for group in section.groups]}
    for name in ("lr_1d", "lr_rest"):
        if (own := getattr(section, name)) is not None:
            changed[name] = own * factor
    return replace(section, **changed)


def read_losses(file: Path) -> tuple[list[float], list[float], float | None]:
    """Return learning rates and losses of a run's metrics, up to the first that is not finite.

    The third is the rate of that one, None if all are finite.
    """
    lrs: list[float] = []
    losses: list[float] = []
    if file.exists():
        for row in map(json.loads, file.read_text(encoding="utf-8").splitlines()):
            if "train/lr" in row:
                if row["train/loss"] is None:
                    return lrs, losses, row["train/lr"]
                lrs.append(row["train/lr"])
                losses.append(row["train/loss"])
    return lrs, losses, None


def describe_range(lrs: list[float], losses: list[float], end: float | None = None) -> LrRange:
    """Return the findings from losses at rising rates. At the rate `end` the loss is not finite."""
    smoothed = smooth(losses)
    lowest = min(range(len(smoothed)), key=smoothed.__getitem__)
    enough = next(lr for lr, loss in zip(lrs, smoothed) if loss <= NEAR * smoothed[lowest])
    beyond = zip(lrs[lowest:], smoothed[lowest:])
    diverges = next((lr for lr, loss in beyond if loss > DIVERGED * smoothed[lowest]), end)
    return LrRange(lrs, losses, smoothed, lrs[lowest], enough, diverges)


def smooth(values: list[float]) -> list[float]:
    """Return the exponential moving average at each value, without a bias to a start of 0.

    It is a mean of about `SPAN` of the values: a longer one would be late by decades of rates where
    the values are few.
    """
    share = min(SMOOTHING, max(0.0, 1 - 1 / (SPAN * len(values))))
    result, mean, weight = [], 0.0, 0.0
    for value in values:
        mean = share * mean + (1 - share) * value
        weight = share * weight + (1 - share)
        result.append(mean / weight)
    return result
