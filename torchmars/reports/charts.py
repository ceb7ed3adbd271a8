"""Which charts a run's measurements make, and which of them go into one chart."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torchmars.records.run import BITS, SKIPPED, Run

# The phases of a step, in time order.
PHASES = ("data", "forward", "backward", "pipeline", "reduce", "optimizer", "other")


@dataclass(frozen=True)
class Chart:
    """A chart of measurements over the steps of runs."""

    title: str
    pattern: str
    """A regular expression that the names of its measurements match."""
    unit: str = ""
    log: bool = True
    """Whether its values can be on a log axis."""
    smooth: bool = True
    """Whether its values are noisy, so that smoothing helps."""
    from_zero: bool = False
    """Whether 0 is the end of its scale: shares, counts."""
    stacked: bool = False
    """Whether its values are parts of a whole."""
    names: tuple[str, ...] = ()
    """The measurements that it has."""


LOSS = Chart("Training loss", r"train/loss")
VALIDATION = "validation/loss"
CHARTS = (
    LOSS,
    Chart("Validation loss", VALIDATION, smooth=False),
    Chart("Validation loss, bits per byte", re.escape(BITS), smooth=False),
    Chart("Validation loss of parts", r"validation/.+/loss", smooth=False),
    Chart("Learning rate", r"train/lr", smooth=False),
    Chart("Gradient norm", r"train/grad_norm"),
    Chart("Largest attention logit", r"train/attention/largest_logit(/\d+)?"),
    Chart("Clip rate", r"train/.+/clipped", "share of tensors", log=False, from_zero=True),
    Chart("Cosine of successive gradients", r"train/.+/cosine", log=False),
    Chart(
        "Skipped steps", r"train/skipped_steps", "so far", log=False, smooth=False, from_zero=True
    ),
    Chart("Tokens per second", r"train/tokens_per_second"),
    Chart("MFU", r"train/mfu", "share of the peak", log=False, from_zero=True),
    Chart("Time of a step", r"train/[a-z]+_ms", "ms", log=False, stacked=True),
    Chart("Memory, peak so far", r"train/memory_gib", "GiB", log=False, smooth=False),
    Chart("Stall of a checkpoint", r"checkpoint/stall_ms", "ms", smooth=False),
)
# Axes, or in other charts.
NOT_DRAWN = re.compile(r"train/(tokens|skipped_in_a_row)")


def names_measured(runs: list[Run]) -> set[str]:
    """Return the names of all that `runs` measured, except skipped steps if there were none."""
    names: set[str] = set().union(*(run.series for run in runs))
    return names if any(len(run.skipped.steps) for run in runs) else names - {SKIPPED}


def charts_of(names: set[str]) -> tuple[list[Chart], list[Chart]]:
    """Return charts of measurements, those that all runs have first, and one for each other."""
    left = sorted(name for name in names if not NOT_DRAWN.fullmatch(name))
    charts = []
    for chart in CHARTS:
        own = [name for name in left if re.fullmatch(chart.pattern, name)]
        left = [name for name in left if name not in own]
        if own:
            charts.append(replace(chart, names=tuple(sorted(own, key=in_time))))
    evaluations = [name for name in left if name.startswith("evaluation/")]
    others = [single(name, log=True) for name in left if name not in evaluations]
    return [*charts, *(single(name, log=False) for name in evaluations)], others


def single(name: str, log: bool) -> Chart:
    """Return the chart of one measurement."""
    title = name.removeprefix("evaluation/").removeprefix("train/")
    smooth = name.startswith("train/")
    return Chart(title, re.escape(name), log=log, smooth=smooth, names=(name,))


def run_names(runs: list[Run]) -> list[str]:
    """Return what the runs are called: by their names or, where two have the same, their paths."""
    count = Counter(run.name for run in runs)
    return [run.name if count[run.name] == 1 else str(run.folder) for run in runs]


def short_names(names: Sequence[str]) -> list[str]:
    """Return what a legend calls the measurements of a chart: by the part that differs."""
    parts = [name.removesuffix("_ms").split("/") for name in names]
    return [
        "/".join(part for part, *same in zip(own, *parts) if len(set(same)) > 1) or own[-1]
        for own in parts
    ]


def in_time(name: str) -> int:
    """Return the place of a phase among those of a step."""
    phase = short_names([name])[0]
    return PHASES.index(phase) if phase in PHASES else len(PHASES)
