"""Which charts a run's measurements make, and which of them go into one chart."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torchmars.records.run import BITS, SKIPPED, SPEED, Run


@dataclass(frozen=True)
class Chart:
    """A chart of measurements over the steps of runs."""

    title: str
    pattern: str
    """A regular expression that the names of its measurements match."""
    smooth: bool = False
    """Whether its values are noisy, so that means of them are drawn."""
    from_zero: bool = False
    """Whether 0 is the end of its scale: speeds, shares, counts."""
    log: bool = False
    """Whether its values are of different orders."""
    names: tuple[str, ...] = ()
    """The measurements that it has."""


LOSS = Chart("Training loss", r"train/loss", smooth=True)
VALIDATION = "validation/loss"
# What everybody looks at, and the rest.
MAIN = (
    LOSS,
    Chart("Validation loss", VALIDATION),
    Chart("Learning rate", r"train/lr"),
    Chart("Tokens per second", SPEED, smooth=True, from_zero=True),
)
REST = (
    Chart("Validation loss, bits per byte", re.escape(BITS)),
    Chart("Validation loss of parts", r"validation/.+/loss"),
    Chart("Gradient norm", r"train/grad_norm", smooth=True, log=True),
    Chart("Largest attention logit", r"train/attention/largest_logit(/\d+)?", smooth=True),
    Chart("Clip rate (share of tensors)", r"train/.+/clipped", smooth=True, from_zero=True),
    Chart("Cosine of successive gradients", r"train/.+/cosine", smooth=True),
    Chart("Skipped steps so far", SKIPPED, from_zero=True),
    Chart("MFU (share of the peak)", r"train/mfu", smooth=True, from_zero=True),
    Chart("Time of a step (ms)", r"train/[a-z]+_ms", smooth=True, from_zero=True),
    Chart("Peak memory so far (GiB)", r"train/memory_gib"),
    Chart("Stall of a checkpoint (ms)", r"checkpoint/stall_ms"),
)
# The axis itself, and what is in other charts.
NOT_DRAWN = re.compile(r"train/(tokens|skipped_in_a_row|bits_per_byte)")


def charts_of(runs: Sequence[Run], every: bool) -> list[Chart]:
    """Return the charts that runs have measurements for: the main ones, or `every` one.

    What no run measured twice has none, since one point is no curve. Nor have skipped steps of runs
    that skipped none.
    """
    measured = {name for run in runs for name in run.series if len(run.finite(name)) > 1}
    if not any(len(run.skipped.steps) for run in runs):
        measured.discard(SKIPPED)
    left = sorted(name for name in measured if not NOT_DRAWN.fullmatch(name))
    charts = []
    for chart in (*MAIN, *REST) if every else MAIN:
        own = [name for name in left if re.fullmatch(chart.pattern, name)]
        left = [name for name in left if name not in own]
        if own:
            charts.append(replace(chart, names=tuple(own)))
    return charts + [chart_of(name) for name in left if every]


def chart_of(name: str) -> Chart:
    """Return the chart of a measurement that no other has."""
    title = name.removeprefix("evaluation/").removeprefix("train/")
    return Chart(title, re.escape(name), smooth=name.startswith("train/"), names=(name,))


def short_names(names: Sequence[str]) -> list[str]:
    """Return what a legend calls the measurements of a chart: by the part that differs."""
    parts = [name.removesuffix("_ms").split("/") for name in names]
    return [
        "/".join(part for part, *same in zip(own, *parts) if len(set(same)) > 1) or own[-1]
        for own in parts
    ]
