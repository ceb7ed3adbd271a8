"""Statistics of trials: means and spreads, differences and savings, with 95% intervals."""

import math
import statistics
from collections.abc import Sequence
from typing import Any

from scipy import stats

from torchmars.comparison.results import Difference, Estimate, LossCurve

CONFIDENCE = 0.95


def mean_with_interval(values: Sequence[float]) -> Estimate:
    """Return the mean of values, one for each seed, with Student's interval."""
    if len(values) < 2:
        return Estimate(statistics.fmean(values), None, None)
    test = stats.ttest_1samp(values, 0.0) if statistics.variance(values) else None
    return estimate(statistics.fmean(values), test)


def difference(
    first: str, losses: Sequence[float], second: str, others: Sequence[float]
) -> Difference:
    """Return the difference of two contenders' mean losses with Welch's interval.

    Source: Welch 1947, "The generalization of 'Student's' problem when several different population
    variances are involved".
    """
    mean = statistics.fmean(losses) - statistics.fmean(others)
    if min(len(losses), len(others)) < 2:
        return Difference(first, second, Estimate(mean, None, None), False)
    spread = statistics.variance(losses) + statistics.variance(others)
    test = stats.ttest_ind(losses, others, equal_var=False) if spread else None
    found = estimate(mean, test)
    low, high = found.low, found.high
    shown = low is not None and high is not None and (low > 0 or high < 0)
    return Difference(first, second, found, shown)


def estimate(mean: float, test: Any) -> Estimate:
    """Return a mean with the interval of scipy's `test`; None if nothing varies."""
    if test is None:
        return Estimate(mean, mean, mean)
    interval = test.confidence_interval(CONFIDENCE)
    return Estimate(mean, float(interval.low), float(interval.high))


def reached_at(curve: LossCurve, loss: float) -> float | None:
    """Return after how many tokens a curve first reaches a loss, linear between validations.

    None: it never does. Before its first validation nothing is known, so that this one counts where
    it is low enough.
    """
    before: tuple[float, float] | None = None
    for place, value in zip(curve.tokens, curve.losses):
        if value is None:
            before = None
            continue
        if value <= loss:
            if before is None:
                return place
            share = (before[1] - loss) / (before[1] - value)
            return before[0] + share * (place - before[0])
        before = (place, value)
    return None


def needed(curve: LossCurve, baseline: LossCurve) -> float | None:
    """Return the share of the baseline's tokens that a trial needs for the baseline's final loss.

    It is above 1 where the trial needs more of them. None: it never reaches that loss.
    """
    target = baseline.losses[-1]
    place = None if target is None else reached_at(curve, target)
    return None if place is None else place / baseline.tokens[-1]


def saved(needed: Sequence[float]) -> Estimate:
    """Return the saving if these shares are `needed`, one for each seed.

    It is 1 minus their geometric mean, with Student's interval of their logarithms: an interval of
    the shares themselves could end above 1, and nobody saves more than all.
    """
    logs = mean_with_interval([math.log(share) for share in needed])
    low, high = logs.low, logs.high
    return Estimate(
        -math.expm1(logs.mean),
        None if high is None else -math.expm1(high),
        None if low is None else -math.expm1(low),
    )
