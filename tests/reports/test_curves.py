"""Curves thinned for a page."""

import numpy as np
import pytest

from torchmars.records.run import Series
from torchmars.reports.curves import buckets_for, thinned


@pytest.fixture
def noise():
    values = np.random.default_rng(0).standard_normal(100_000)
    values[[31_415, 92_653]] = 40.0, -40.0
    return Series(np.arange(1, 100_001), values)


def test_extremes_and_ends_are_kept(noise):
    curve = thinned(noise, 300)
    assert len(curve.steps) < 4 * 300 and curve.rows == 100_000
    assert curve.steps == sorted(set(curve.steps))
    points = dict(zip(curve.steps, curve.values))
    assert points[31_416] == 40.0 and points[92_654] == -40.0
    assert curve.steps[0] == 1 and curve.steps[-1] == 100_000
    for step, value in points.items():
        assert value == pytest.approx(noise.values[step - 1], rel=1e-5)


def test_every_window_reaches_as_far_as_the_rows_do(noise):
    """Between two drawn steps no value lies beyond those of the buckets that they are of."""
    curve = thinned(noise, 300)
    drawn = np.array(curve.steps)
    for begin in range(0, 100_000, 5_000):  # many buckets long
        inside = (drawn > begin) & (drawn <= begin + 5_000)
        values = np.array(curve.values, dtype=float)[inside]
        rows = noise.values[begin : begin + 5_000]
        wider = noise.values[max(begin - 700, 0) : begin + 5_700]
        assert wider.min() - 1e-4 <= values.min() and values.max() <= wider.max() + 1e-4
        assert values.max() >= np.sort(rows)[-3] - 1e-4  # a bucket at an edge may be elsewhere


def test_means_are_those_of_all_rows(noise):
    curve = thinned(noise, 300)
    # A mean step is in the middle of its bucket: half of it lies before, and the next begins there.
    counts, end = [], 0.5
    for middle in curve.mean_steps:
        counts.append(round(2 * (middle - end)))
        end += counts[-1]
    assert sum(counts) == 100_000
    total = float(np.dot(counts, curve.means))
    assert total == pytest.approx(noise.values.sum(), abs=0.5)


def test_log_axes_have_points_at_the_begin(noise):
    assert sum(step <= 1000 for step in thinned(noise, 300).steps) > 100


def test_few_rows_are_all_drawn():
    series = Series(np.arange(5) * 10, np.array([5.0, np.nan, np.nan, 4.0, np.inf]))
    curve = thinned(series, 200)
    assert curve.steps == [0, 10, 30, 40]
    assert curve.values == [5.0, None, 4.0, None]  # a gap for each stretch without values
    assert curve.rows == 2 and curve.not_finite == 3 and not curve.means
    assert curve.json()["notFinite"] == 3
    assert thinned(Series(np.array([1]), np.array([np.nan])), 200).values == [None]


def test_many_curves_have_fewer_points_each():
    assert buckets_for(1) > buckets_for(20) > 0
    assert 20 * buckets_for(20) <= 6000
