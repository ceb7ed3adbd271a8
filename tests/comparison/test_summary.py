"""Savings over seeds: of trials with the same seed, and only where all reach the loss."""

import pytest

from torchmars.comparison.results import ContenderResult, LossCurve, TrialResult
from torchmars.comparison.statistics import saved
from torchmars.comparison.study import edges_of
from torchmars.comparison.summary import differences, savings


def trial(seed, losses):
    curve = LossCurve([100, 200, 300], losses)
    return TrialResult("", "", {}, seed, "done", "", losses[-1], curve, "")


BASELINE = [trial(0, [5.0, 4.0, 3.0]), trial(1, [6.0, 5.0, 4.0])]


def test_trials_of_the_same_seed_are_compared():
    fast = [trial(0, [4.0, 3.0, 2.5]), trial(1, [6.0, 5.0, 3.0])]
    assert savings(fast, "adamw", BASELINE) == (saved([200 / 300, 250 / 300]), "")
    tokens, _ = savings(fast[1:], "adamw", BASELINE)
    assert tokens.mean == pytest.approx(1 / 6) and tokens.low is None


def test_without_the_loss_there_is_no_number():
    mixed = [trial(0, [4.0, 3.0, 2.5]), trial(1, [6.0, 5.0, 4.5])]
    for repeats, remark in [
        (mixed, "it stays above muon's loss with 1 of 2 seeds"),
        (mixed[1:], "it stays above muon's loss"),
        ([trial(2, [4.0, 3.0, 2.5])], "no seed with which both it and muon are done"),
    ]:
        assert savings(repeats, "muon", BASELINE) == (None, remark)


def result(name, losses, edges=None):
    mean = sum(losses) / len(losses) if losses else None
    return ContenderResult(name, name, {}, edges or {}, losses, mean, None, None, "")


def test_differences_are_measured_against_the_baseline():
    """Its own pairs come first, also those of contenders that are worse; then the others'."""
    three = [result("a", [1.0]), result("b", [2.0]), result("c", [4.0]), result("none", [])]

    def found(baseline):
        return [(each.first, each.second, each.loss.mean) for each in differences(three, baseline)]

    assert found("b") == [("a", "b", -1), ("c", "b", 2), ("a", "c", -3)]
    assert found("c") == [("a", "c", -3), ("b", "c", -2), ("a", "b", -1)]
    assert found("none") == found(None) == [("a", "b", -1), ("a", "c", -3), ("b", "c", -2)]


def test_the_edge_of_a_grid_is_that_of_each_number():
    grid = {
        "lr": [1e-3, 2e-3, 4e-3],
        "weight_decay": [0.1],
        "gamma": [0.0, 0.1, 0.2],
        "betas": [[0.8, 0.99], [0.9, 0.95], [0.95, 0.99]],
    }
    inside = {"lr": 2e-3, "weight_decay": 0.1, "gamma": 0.1}
    assert edges_of(inside, grid) == {}
    assert edges_of({"lr": 1e-3, "gamma": 0.2}, grid) == {"lr": "lowest", "gamma": "highest"}
    assert edges_of({"gamma": 0.0}, grid) == {}  # nothing is below it
    for betas, edges in [
        ([0.8, 0.99], {"betas[0]": "lowest"}),
        ([0.9, 0.95], {}),  # of the second two values were tried
        ([0.95, 0.99], {"betas[0]": "highest"}),
    ]:
        assert edges_of({"betas": betas}, grid) == edges
    second = [[0.9, 0.95], [0.9, 0.98], [0.9, 0.99]]
    assert edges_of({"betas": second[0]}, {"betas": second}) == {"betas[1]": "lowest"}


def test_of_two_values_only_the_learning_rate_has_an_edge():
    """Each of them is at one; --widen can try more learning rates."""
    grid = {"lr": [1e-3, 2e-3], "gamma": [0.1, 0.2], "betas": [[0.9, 0.95], [0.95, 0.99]]}
    best = {"lr": 2e-3, "gamma": 0.2, "betas": [0.9, 0.95]}
    assert edges_of(best, grid) == {"lr": "highest"}
    assert edges_of(best, grid | {"lr": [2e-3]}) == {}
