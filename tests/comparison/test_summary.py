"""Savings over seeds: of trials with the same seed, and only where all reach the loss."""

import pytest

from torchmars.comparison.results import Curve, TrialResult
from torchmars.comparison.statistics import mean_with_interval
from torchmars.comparison.summary import savings


def trial(seed, losses, pace=1):
    curve = Curve([100, 200, 300], [pace, 2 * pace, 3 * pace], losses)
    return TrialResult("", "", {}, seed, "done", "", losses[-1], 3 * pace, curve, "")


BASELINE = [trial(0, [5.0, 4.0, 3.0]), trial(1, [6.0, 5.0, 4.0])]


def test_trials_of_the_same_seed_are_compared():
    fast = [trial(0, [4.0, 3.0, 2.5], pace=2), trial(1, [6.0, 5.0, 3.0], pace=2)]
    tokens, seconds, remark = savings(fast, BASELINE)
    assert tokens == mean_with_interval([1 - 200 / 300, 1 - 250 / 300]) and remark == ""
    assert seconds == mean_with_interval([1 - 4 / 3, 1 - 5 / 3])
    tokens, _, _ = savings(fast[1:], BASELINE)
    assert tokens.mean == pytest.approx(1 / 6) and tokens.low is None


def test_without_the_loss_there_is_no_number():
    mixed = [trial(0, [4.0, 3.0, 2.5]), trial(1, [6.0, 5.0, 4.5])]
    for repeats, remark in [
        (mixed, "it never reaches adamw's final loss with 1 of 2 seeds"),
        (mixed[1:], "it never reaches adamw's final loss"),
        ([trial(2, [4.0, 3.0, 2.5])], "no seed with which both it and adamw are done"),
    ]:
        assert savings(repeats, BASELINE) == (None, None, remark)
