"""Curves for a page: few enough points to draw at once, none of the extremes left out."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchmars.records.run import Run, Series

# Buckets of all curves of a chart together, and the fewest and most of one curve. Charts are at
# most some 1200 pixels wide.
BUCKETS_OF_A_CHART, FEWEST, MOST = 6000, 200, 1200
MOST_GAPS = 100
DIGITS = 6


@dataclass(frozen=True)
class Curve:
    """The points of a `Series` that a page draws, and the means that it smooths.

    The rows are cut into buckets, half of them equally long, half of them equally long on a log
    axis. Of each bucket the first and the last row, the least and the greatest value are drawn.
    """

    steps: list[int]
    values: list[float | None]
    """None where values were not finite: the line has a gap there."""
    mean_steps: list[float]
    means: list[float]
    """The mean over all rows of each bucket; empty where all rows are drawn."""
    rows: int
    not_finite: int
    median: float

    def json(self) -> dict[str, Any]:
        """Return the curve as the page's script reads it."""
        facts = {"x": self.steps, "y": self.values, "rows": self.rows, "median": self.median}
        if self.means:
            facts |= {"meanX": self.mean_steps, "mean": self.means}
        return facts | ({"notFinite": self.not_finite} if self.not_finite else {})


def buckets_for(curves: int) -> int:
    """Return the buckets of each curve in a chart of so many curves."""
    return max(FEWEST, min(MOST, BUCKETS_OF_A_CHART // max(curves, 1)))


def thinned(series: Series, buckets: int) -> Curve:
    """Return a series as a curve of about `buckets` buckets, or with all rows if these are few."""
    finite = np.isfinite(series.values)
    steps, values = series.steps[finite], series.values[finite]
    kept, mean_steps, means = np.arange(len(values)), np.empty(0), np.empty(0)
    if len(values) > 2 * buckets:
        begins = bucket_begins(len(values), buckets)
        counts = np.diff(begins, append=len(values))
        kept = extremes(values, begins, counts)
        mean_steps = np.add.reduceat(steps, begins) / counts
        means = np.add.reduceat(values, begins) / counts
    gaps = gap_steps(series.steps, finite)
    drawn = [*zip(steps[kept].tolist(), rounded(values[kept]))]
    points = sorted([*drawn, *((step, None) for step in gaps)], key=lambda point: point[0])
    return Curve(
        steps=[step for step, _ in points],
        values=[value for _, value in points],
        mean_steps=[round(step, 1) for step in mean_steps.tolist()],
        means=rounded(means),
        rows=len(values),
        not_finite=int((~finite).sum()),
        median=float(np.median(values)) if len(values) else 0.0,
    )


def bucket_begins(rows: int, buckets: int) -> NDArray[np.int64]:
    """Return the first row of each bucket: half of them evenly spaced, half of them by ratio."""
    even = np.linspace(0, rows, buckets // 2, endpoint=False)
    by_ratio = np.geomspace(1, rows, buckets // 2, endpoint=False)
    return np.unique(np.concatenate([even, by_ratio]).astype(np.int64))


def extremes(
    values: NDArray[np.float64], begins: NDArray[np.int64], counts: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the rows with the first, last, least and greatest value of each bucket."""
    kept = [begins, begins + counts - 1]
    bucket = np.repeat(np.arange(len(begins)), counts)
    for extreme in (np.minimum, np.maximum):
        rows = np.flatnonzero(values == extreme.reduceat(values, begins)[bucket])
        _, first = np.unique(bucket[rows], return_index=True)
        kept.append(rows[first])
    return np.unique(np.concatenate(kept))


def gap_steps(steps: NDArray[np.int64], finite: NDArray[np.bool_]) -> list[int]:
    """Return the step of the first row of each stretch without finite values, up to `MOST_GAPS`."""
    begins = ~finite & np.concatenate([[True], finite[:-1]])
    return steps[begins][:MOST_GAPS].tolist()


def rounded(values: NDArray[np.float64]) -> list[float]:
    """Return values with the digits that a page needs, so that it stays small."""
    return [float(f"{value:.{DIGITS}g}") for value in values.tolist()]


def axes(run: Run, knots: int = 200) -> dict[str, list[float]]:
    """Return tokens and seconds at some steps of a run. Between them they are nearly linear."""
    steps = np.unique(np.linspace(0, run.last_step, knots).astype(np.int64))
    return {
        "step": steps.tolist(),
        "tokens": rounded(run.tokens(steps)),
        "seconds": rounded(run.seconds(steps)),
    }
