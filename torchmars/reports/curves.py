"""Curves of runs, for pages and pictures: few enough points to draw at once, and their means."""

import numpy as np
from numpy.typing import NDArray

from torchmars.records.run import Series

# Buckets of all curves of a chart together, and the fewest and most of one curve. Charts are at
# most some 1200 pixels wide.
BUCKETS_OF_A_CHART, FEWEST, MOST = 6000, 200, 1200
MOST_GAPS = 100
# A curve of more rows than this is smoothed: each value is the mean over this share of all rows.
NOISY, SHARE = 60, 0.03


def buckets_for(curves: int) -> int:
    """Return the buckets of each curve in a chart of so many curves."""
    return max(FEWEST, min(MOST, BUCKETS_OF_A_CHART // max(curves, 1)))


def thinned(series: Series, buckets: int) -> Series:
    """Return the points of a series to draw: all, or those of about `buckets` buckets of rows.

    Half of the buckets are equally long, half of them equally long on a log axis. Of each the
    first and the last row, the least and the greatest value are kept. NaN is a gap: one for each
    stretch without finite values.
    """
    finite = np.isfinite(series.values)
    rows = np.flatnonzero(finite)
    if len(rows) > 2 * buckets:
        rows = rows[extremes(series.values[rows], bucket_begins(len(rows), buckets))]
    gaps = np.flatnonzero(~finite & np.concatenate([[True], finite[:-1]]))[:MOST_GAPS]
    kept = np.union1d(rows, gaps)
    return Series(series.steps[kept], np.where(finite, series.values, np.nan)[kept])


def bucket_begins(rows: int, buckets: int) -> NDArray[np.int64]:
    """Return the first row of each bucket: half of them evenly spaced, half of them by ratio."""
    even = np.linspace(0, rows, buckets // 2, endpoint=False)
    by_ratio = np.geomspace(1, rows, buckets // 2, endpoint=False)
    return np.unique(np.concatenate([even, by_ratio]).astype(np.int64))


def extremes(values: NDArray[np.float64], begins: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the rows with the first, last, least and greatest value of each bucket."""
    counts = np.diff(begins, append=len(values))
    kept = [begins, begins + counts - 1]
    bucket = np.repeat(np.arange(len(begins)), counts)
    for extreme in (np.minimum, np.maximum):
        rows = np.flatnonzero(values == extreme.reduceat(values, begins)[bucket])
        _, first = np.unique(bucket[rows], return_index=True)
        kept.append(rows[first])
    return np.unique(np.concatenate(kept))


def smoothed(series: Series, points: int = 1000) -> Series:
    """Return means over a window of rows that moves along; a short series is returned as it is.

    Values that are not finite count for nothing. As many rows are left as a chart can show.
    """
    rows = len(series.steps)
    if rows <= NOISY:
        return series
    half = max(int(SHARE * rows) // 2, 1)
    finite = np.isfinite(series.values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(finite, series.values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(finite)])
    kept = np.unique(np.linspace(0, rows - 1, min(rows, points)).astype(np.int64))
    # At both ends the window is shorter, and stays around its row.
    reach = np.minimum(half, np.minimum(kept, rows - 1 - kept))
    begins, ends = kept - reach, kept + reach + 1
    inside = counts[ends] - counts[begins]
    means = np.where(inside > 0, (sums[ends] - sums[begins]) / np.maximum(inside, 1), np.nan)
    return Series(series.steps[kept], means)


def parts_of_a_whole(parts: list[Series]) -> list[Series]:
    """Return the smoothed parts of a whole at the same steps, 0 where one has no value."""
    steps, whole = np.unique(np.concatenate([part.steps for part in parts])), []
    for part in parts:
        values = np.zeros(len(steps))
        values[np.searchsorted(steps, part.steps)] = np.nan_to_num(part.values)
        whole.append(smoothed(Series(steps, values)))
    return whole
