"""What trials tell, against formulas worked out here."""

import math
import statistics

import pytest

from torchmars.comparison.results import Estimate, LossCurve
from torchmars.comparison.statistics import (
    difference,
    mean_with_interval,
    needed,
    reached_at,
    saved,
)

# The quantile of Student's distribution at 97.5% with 2 degrees of freedom, from a table.
T2 = 4.30265


def test_the_interval_of_a_mean_is_students():
    values = [3.0, 3.3, 3.9]
    found = mean_with_interval(values)
    half = T2 * statistics.stdev(values) / math.sqrt(3)
    assert found.mean == pytest.approx(3.4)
    assert (found.low, found.high) == pytest.approx((3.4 - half, 3.4 + half), abs=1e-5)
    assert mean_with_interval([2.0]) == Estimate(2.0, None, None)
    assert mean_with_interval([2.0, 2.0]) == Estimate(2.0, 2.0, 2.0)


def test_the_interval_of_a_difference_is_welchs():
    """The variances 1 and 4 of 4 and 4 values give 25 / (1/3 + 16/3) = 4.412 degrees of freedom."""
    narrow = [10 + each * math.sqrt(0.75) for each in (-1, -1, 1, 1)]
    wide = [5 + each * math.sqrt(3) for each in (-1, -1, 1, 1)]
    found = difference("a", narrow, "b", wide)
    assert (found.first, found.second, found.loss.mean) == ("a", "b", pytest.approx(5))
    # Between the quantiles of 4 and of 5 degrees of freedom, 2.776 and 2.571.
    half = (found.loss.high - found.loss.low) / 2 / math.sqrt(1.25)
    assert half == pytest.approx(2.6775, abs=2e-3)
    assert found.loss.high - 5 == pytest.approx(5 - found.loss.low) and found.shown
    assert not difference("a", [1.0, 3.0], "b", [2.0, 4.0]).shown
    assert difference("a", [1.0, 1.0], "b", [2.0, 2.0]).loss == Estimate(-1, -1, -1)
    alone = difference("a", [1.0], "b", [2.0, 3.0])
    assert alone.loss == Estimate(-1.5, None, None) and not alone.shown


def test_savings_are_read_off_the_curve():
    baseline = LossCurve([100, 200, 300, 400], [5.0, 4.0, 3.5, 3.0])
    faster = LossCurve([100, 200, 300, 400], [4.0, 3.2, 2.8, 2.5])
    assert reached_at(faster, 3.0) == 250  # half of the way from 3.2 to 2.8
    assert needed(faster, baseline) == 250 / 400
    assert needed(baseline, faster) is None
    # The first that reaches it counts, also where the loss rises again or was not finite before.
    restless = LossCurve([1, 2, 3, 4], [None, 2.0, 4.0, 2.5])
    assert reached_at(restless, 3.0) == 2


def test_nobody_saves_more_than_all():
    """Half, a fifth and a twentieth are needed: a geometric mean of 0.005^(1/3) = 0.171."""
    found = saved([0.5, 0.2, 0.05])
    assert found.mean == pytest.approx(1 - 0.005 ** (1 / 3))
    half = T2 * statistics.stdev([math.log(0.5), math.log(0.2), math.log(0.05)]) / math.sqrt(3)
    assert found.high == pytest.approx(1 - 0.005 ** (1 / 3) * math.exp(-half), rel=1e-5)
    assert found.low == pytest.approx(1 - 0.005 ** (1 / 3) * math.exp(half), rel=1e-5)
    assert found.low < found.mean < found.high < 1
    # Twice as many is as far from 1 as half as many.
    assert saved([2.0, 0.5]).mean == pytest.approx(0)
    assert saved([0.8]) == Estimate(pytest.approx(0.2), None, None)
