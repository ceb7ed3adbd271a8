"""Curves thinned for a page."""

import numpy as np
import pytest

from torchmars.records.run import Series
from torchmars.reports.curves import buckets_for, parts_of_a_whole, smoothed, thinned

PARTS = (([2, 4], [1.0, np.nan]), ([1, 2, 4], [3.0, 4.0, 5.0]))


@pytest.fixture
def noise():
    values = np.random.default_rng(0).standard_normal(100_000)
    values[[31_415, 92_653]] = 40.0, -40.0
    return Series(np.arange(1, 100_001), values)


def test_extremes_and_ends_are_kept(noise):
    curve = thinned(noise, 300)
    assert len(curve.steps) < 4 * 300 and (np.diff(curve.steps) > 0).all()
    points = dict(zip(curve.steps, curve.values))
    assert points[31_416] == 40.0 and points[92_654] == -40.0
    assert curve.steps[0] == 1 and curve.steps[-1] == 100_000
    for step, value in points.items():
        assert value == pytest.approx(noise.values[step - 1], rel=1e-5)


def test_every_window_reaches_as_far_as_the_rows_do(noise):
    """Between two drawn steps no value lies beyond those of the buckets that they are of."""
    curve = thinned(noise, 300)
    drawn = curve.steps
    for begin in range(0, 100_000, 5_000):  # many buckets long
        inside = (drawn > begin) & (drawn <= begin + 5_000)
        values = curve.values[inside]
        rows = noise.values[begin : begin + 5_000]
        wider = noise.values[max(begin - 700, 0) : begin + 5_700]
        assert wider.min() - 1e-4 <= values.min() and values.max() <= wider.max() + 1e-4
        assert values.max() >= np.sort(rows)[-3] - 1e-4  # a bucket at an edge may be elsewhere


def test_log_axes_have_points_at_the_begin(noise):
    assert sum(step <= 1000 for step in thinned(noise, 300).steps) > 100


def test_few_rows_are_all_drawn():
    series = Series(np.arange(5) * 10, np.array([5.0, np.nan, np.nan, 4.0, np.inf]))
    curve = thinned(series, 200)
    assert curve.steps.tolist() == [0, 10, 30, 40]
    # A gap for each stretch without values.
    np.testing.assert_array_equal(curve.values, [5.0, np.nan, 4.0, np.nan])
    np.testing.assert_array_equal(
        thinned(Series(np.array([1]), np.array([np.nan])), 200).values, [np.nan]
    )


def test_many_curves_have_fewer_points_each():
    assert buckets_for(1) > buckets_for(20) > 0
    assert 20 * buckets_for(20) <= 6000


def test_smoothing_is_the_mean_around_each_row():
    steps, values = np.arange(10, 510), np.random.default_rng(0).normal(size=500)
    values[[0, 250, 251]] = np.nan
    found = smoothed(Series(steps, values))
    assert found.steps.tolist() == steps.tolist()
    for row, mean in enumerate(found.values):
        reach = min(7, row, 499 - row)  # 3% of 500 rows
        around = values[row - reach : row + reach + 1]
        if row == 0:
            assert np.isnan(mean)
        else:
            assert mean == pytest.approx(np.nanmean(around))
    short = Series(steps[:50], values[:50])
    assert smoothed(short) is short
    assert len(smoothed(Series(np.arange(10**5), np.zeros(10**5))).steps) == 1000


def test_parts_of_a_whole_have_the_same_steps():
    one, two = (Series(np.array(steps), np.array(values)) for steps, values in PARTS)
    found = parts_of_a_whole([one, two])
    assert [part.steps.tolist() for part in found] == [[1, 2, 4]] * 2
    assert [part.values.tolist() for part in found] == [[0, 1, 0], [3, 4, 5]]
