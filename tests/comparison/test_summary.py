"""Savings over seeds: of trials with the same seed, and only where all reach the loss."""

from types import SimpleNamespace

import pytest

from torchmars.comparison.results import ContenderResult, LossCurve, TrialResult
from torchmars.comparison.statistics import saved
from torchmars.comparison.study import edges_of
from torchmars.comparison.summary import differences, notes, savings

NOTHING = LossCurve([], [], [])


def trial(seed, losses, pace=1):
    curve = LossCurve([100, 200, 300], [pace, 2 * pace, 3 * pace], losses)
    return TrialResult("", "", {}, seed, "done", "", losses[-1], 3 * pace, curve, "")


BASELINE = [trial(0, [5.0, 4.0, 3.0]), trial(1, [6.0, 5.0, 4.0])]


def test_trials_of_the_same_seed_are_compared():
    fast = [trial(0, [4.0, 3.0, 2.5], pace=2), trial(1, [6.0, 5.0, 3.0], pace=2)]
    tokens, seconds, remark = savings(fast, "adamw", BASELINE)
    assert tokens == saved([200 / 300, 250 / 300]) and remark == ""
    assert seconds == saved([4 / 3, 5 / 3])
    tokens, _, _ = savings(fast[1:], "adamw", BASELINE)
    assert tokens.mean == pytest.approx(1 / 6) and tokens.low is None


def test_without_the_loss_there_is_no_number():
    mixed = [trial(0, [4.0, 3.0, 2.5]), trial(1, [6.0, 5.0, 4.5])]
    for repeats, remark in [
        (mixed, "it stays above muon's loss with 1 of 2 seeds"),
        (mixed[1:], "it stays above muon's loss"),
        ([trial(2, [4.0, 3.0, 2.5])], "no seed with which both it and muon are done"),
    ]:
        assert savings(repeats, "muon", BASELINE) == (None, None, remark)


def test_what_is_left_out_is_said(tmp_path):
    """Of adamw one seed diverged, and the folder has a trial that the command does not name."""
    trials = [
        TrialResult(name, "adamw", {"lr": 1.0}, 0, state, "", 3.0, 1.0, NOTHING, "")
        for name, state in [("a", "done"), ("b", "diverged")]
    ]
    result = ContenderResult("adamw", "adamw", {"lr": 1.0}, {}, [3.0], 3.0, None, None, None, "")
    study = SimpleNamespace(
        kind="optimizer",
        folder=tmp_path,
        seeds=[0, 1],
        contenders=[],
        grid={},
        baseline="adamw",
    )
    for name in ("a", "b", "c"):
        (tmp_path / "trials" / name).mkdir(parents=True)
        (tmp_path / "trials" / name / "trial.toml").touch()
    found = notes(study, [result], trials)
    assert any(note.startswith("1 of the trials in this folder are not in") for note in found)
    assert any("adamw has no result of 1 of 2 seeds" in note for note in found)
    # While trials are left to do, those of other seeds are not named yet.
    pending = TrialResult("d", "adamw", {}, 0, "pending", "", None, None, NOTHING, "")
    assert not any("not in these tables" in note for note in notes(study, [], [*trials, pending]))


def result(name, losses, edges=None):
    mean = sum(losses) / len(losses) if losses else None
    return ContenderResult(name, name, {}, edges or {}, losses, mean, None, None, None, "")


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


def test_edges_and_a_missing_baseline_are_said_once(tmp_path):
    names = [SimpleNamespace(name=name, rule=name) for name in ("muon", "mars-m")]
    study = SimpleNamespace(
        kind="optimizer",
        folder=tmp_path,
        seeds=[0],
        contenders=names,
        grid={"gamma": [0.1, 0.2]},
        baseline=None,
    )
    edges = {"gamma": "highest", "betas[0]": "lowest"}
    found = notes(study, [result("mars-m", [1.0], edges), result("muon", [2.0])], [])
    assert [note for note in found if "may not be tuned" in note] == [
        "A best value that is the lowest or the highest one tried may not be tuned: "
        "mars-m gamma (highest), the first of betas (lowest)."
    ]
    assert any("adamw does not take part" in note and "--baseline muon" in note for note in found)
    study.baseline = "mars-m"
    assert not any("--baseline" in note for note in notes(study, [], []))
