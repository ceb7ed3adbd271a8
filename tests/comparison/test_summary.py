"""Savings over seeds: of trials with the same seed, and only where all reach the loss."""

from types import SimpleNamespace

import pytest

from torchmars.comparison.results import ContenderResult, LossCurve, TrialResult
from torchmars.comparison.statistics import saved
from torchmars.comparison.summary import notes, savings

NOTHING = LossCurve([], [], [])


def trial(seed, losses, pace=1):
    curve = LossCurve([100, 200, 300], [pace, 2 * pace, 3 * pace], losses)
    return TrialResult("", "", {}, seed, "done", "", losses[-1], 3 * pace, curve, "")


BASELINE = [trial(0, [5.0, 4.0, 3.0]), trial(1, [6.0, 5.0, 4.0])]


def test_trials_of_the_same_seed_are_compared():
    fast = [trial(0, [4.0, 3.0, 2.5], pace=2), trial(1, [6.0, 5.0, 3.0], pace=2)]
    tokens, seconds, remark = savings(fast, BASELINE)
    assert tokens == saved([200 / 300, 250 / 300]) and remark == ""
    assert seconds == saved([4 / 3, 5 / 3])
    tokens, _, _ = savings(fast[1:], BASELINE)
    assert tokens.mean == pytest.approx(1 / 6) and tokens.low is None


def test_without_the_loss_there_is_no_number():
    mixed = [trial(0, [4.0, 3.0, 2.5]), trial(1, [6.0, 5.0, 4.5])]
    for repeats, remark in [
        (mixed, "it stays above adamw's loss with 1 of 2 seeds"),
        (mixed[1:], "it stays above adamw's loss"),
        ([trial(2, [4.0, 3.0, 2.5])], "no seed with which both it and adamw are done"),
    ]:
        assert savings(repeats, BASELINE) == (None, None, remark)


def test_what_is_left_out_is_said(tmp_path):
    """Of adamw one seed diverged, and the folder has a trial that the command does not name."""
    trials = [
        TrialResult(name, "adamw", {"lr": 1.0}, 0, state, "", 3.0, 1.0, NOTHING, "")
        for name, state in [("a", "done"), ("b", "diverged")]
    ]
    result = ContenderResult("adamw", "adamw", {"lr": 1.0}, {}, [3.0], 3.0, None, None, None, "")
    study = SimpleNamespace(folder=tmp_path, seeds=[0, 1], contenders=[], grid={})
    for name in ("a", "b", "c"):
        (tmp_path / "trials" / name).mkdir(parents=True)
        (tmp_path / "trials" / name / "trial.toml").touch()
    found = notes(study, [result], trials)
    assert any(note.startswith("1 of the trials in this folder are not in") for note in found)
    assert any("adamw has no result of 1 of 2 seeds" in note for note in found)
    # While trials are left to do, those of other seeds are not named yet.
    pending = TrialResult("d", "adamw", {}, 0, "pending", "", None, None, NOTHING, "")
    assert not any("not in these tables" in note for note in notes(study, [], [*trials, pending]))
