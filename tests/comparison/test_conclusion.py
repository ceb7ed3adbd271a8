"""What was found, in words: the finding first, and no claim that one seed carries."""

import statistics
from dataclasses import replace

import pytest

from torchmars.comparison.conclusion import conclusion
from torchmars.comparison.results import (
    Comparison,
    ContenderResult,
    Estimate,
    LossCurve,
    TrialResult,
)
from torchmars.comparison.summary import differences
from torchmars.comparison.tables import difference_rows, lines, markdown
from torchmars.comparison.words import interval_text, seeds_text, share

GRID = {"lr": [1e-3, 2e-3], "gamma": [0.1, 0.2], "betas": [[0.9, 0.99]]}
BEST = {"lr": 2e-3, "gamma": 0.2, "betas": [0.9, 0.99]}
IN_WORDS = "(lr 0.002, gamma 0.2)"  # all have the same betas
# Of two of these the interval is 0.0227 on both sides: with variances of 1e-4 and 4 degrees of
# freedom it is 2.77645 (Student's quantile, from a table) times the root of 2e-4 / 3.
LOW, NEAR, CLEAR = [1.47, 1.48, 1.49], [1.48, 1.49, 1.5], [1.5, 1.51, 1.52]
WILD = [1.4, 1.7, 2.0]


def made(losses, baseline=None, state="done", seeds=3):
    """A comparison whose contenders have these losses, by name, the best first."""
    means = {name: statistics.fmean(own) if own else None for name, own in losses.items()}
    contenders = [
        ContenderResult(name, name, own and BEST, {}, own, means[name], None, None, None, "unknown")
        for name, own in losses.items()
    ]
    trials = [
        TrialResult("", name, BEST, 0, state, "", 1.0, 1.0, LossCurve([], [], []), "trials/a")
        for name in losses
    ]
    pairs = differences(contenders, baseline)
    seeds = list(range(seeds))
    return Comparison(
        "found", ["c.toml"], GRID, seeds, 7, 70, baseline, contenders, pairs, trials, ["A note."]
    )


@pytest.mark.parametrize(
    "value,text",
    [
        (None, ""),
        (Estimate(0.23, 0.15, 0.31), "23.0% (15.0% to 31.0%)"),
        (Estimate(-0.0, None, None), "0.0%"),
        (Estimate(-1e-9, -0.1, 1e-9), "0.0% (-10.0% to 0.0%)"),
        (Estimate(0.01, -1e-9, 0.02), "1.0% (0.0% to 2.0%)"),
        (Estimate(-1.67, None, None), "167.0% more"),
        (Estimate(-1.67, -1.9, -1.4), "167.0% more (140.0% to 190.0%)"),
        (Estimate(-0.03, -0.1, 0.04), "3.0% more (-4.0% to 10.0%)"),
    ],
)
def test_a_share_saved_has_no_negative_zero_and_says_what_is_needed_more(value, text):
    assert share(value) == text


def test_a_difference_that_is_rounded_to_nothing_is_not_negative():
    assert interval_text(Estimate(0.0, -1e-6, 1e-6)) == "+0.0000 to +0.0000"
    tiny = made({"muon": [1.0, 1.1], "mars-m": [1.0 + 1e-9, 1.1 + 1e-9]}, "mars-m", seeds=2)
    assert difference_rows(tiny)[1][1] == "+0.0000"


@pytest.mark.parametrize("baseline", [None, "muon", "mars-m"])
def test_a_difference_comes_first_with_the_interval_and_the_signs_of_the_table(baseline):
    """Where the best is the baseline, the table has the other one minus it."""
    if baseline == "mars-m":
        pair, far, near = "muon - mars-m", "+0.0300", "+0.0100"
        intervals = "+0.0073 to +0.0527", "-0.0127 to +0.0327"
    else:
        pair, far, near = "mars-m - muon", "-0.0300", "-0.0100"
        intervals = "-0.0527 to -0.0073", "-0.0327 to +0.0127"
    found = made({"mars-m": LOW, "muon": CLEAR}, baseline)
    assert conclusion(found) == [
        f"mars-m {IN_WORDS} ends lowest, at 1.4800, 0.0300 below muon {IN_WORDS}; "
        f"{pair} is {far}, 95% interval {intervals[0]}, beyond the spread."
    ]
    assert f"| {pair} | {far} | {intervals[0]} | yes |" in markdown(found)
    found = made({"mars-m": LOW, "muon": NEAR}, baseline)
    assert conclusion(found) == [
        f"No difference that these seeds show: mars-m {IN_WORDS} ends at 1.4800, 0.0100 below "
        f"muon {IN_WORDS}; {pair} is {near}, 95% interval {intervals[1]}."
    ]
    assert f"| {pair} | {near} | {intervals[1]} | no |" in markdown(found)


def test_the_others_are_told_apart_by_the_spread():
    losses = {"mars-m": LOW, "muon": NEAR, "adamw": CLEAR, "lion": WILD}
    found = made(losses, "adamw")
    saving = replace(found.contenders[0], tokens_saved=Estimate(0.5, 0.4, 0.6))
    found = replace(found, contenders=[saving, *found.contenders[1:]])
    first, *others = conclusion(found)
    assert first.startswith("No difference that these seeds show: mars-m ")
    assert others == [
        "Beyond the spread it is below adamw "
        "(mars-m - adamw is -0.0300, 95% interval -0.0527 to -0.0073).",
        "No difference is shown to lion "
        "(mars-m - lion is -0.2200, 95% interval -0.9641 to +0.5241).",
        "mars-m saves 50.0% (40.0% to 60.0%) of the tokens of adamw.",
    ]


def test_one_seed_claims_nothing():
    losses = {"mars-m": [1.48], "muon": [1.5], "adamw": [1.7]}
    assert conclusion(made(losses, seeds=1)) == [
        f"mars-m {IN_WORDS} ends lowest, at 1.4800, 0.0200 below muon {IN_WORDS}.",
        "It is also below adamw (mars-m - adamw is -0.2200).",
        "There is 1 seed (number 0): how far losses spread over seeds is not known.",
    ]
    # Of several seeds one alone is done yet.
    first = conclusion(made({"mars-m": [1.48], "muon": LOW}, state="pending"))[0]
    assert first.startswith("So far: mars-m") and "spread" not in first


def test_where_there_is_no_difference_to_tell():
    same = conclusion(made({"mars-m": [1.48], "muon": [1.48]}, seeds=1))[0]
    assert same == f"mars-m {IN_WORDS} and muon {IN_WORDS} end at the same loss, 1.4800."
    alone = conclusion(made({"mars-m": LOW, "muon": []}))
    assert alone == [f"mars-m {IN_WORDS} ends at 1.4800; no other optimizer has a result."]
    nothing = {"mars-m": [], "muon": []}
    assert conclusion(made(nothing, state="failed")) == ["Nothing: no trial is done."]
    assert conclusion(made(nothing, state="pending")) == ["Nothing yet: no optimizer is tuned."]


def test_it_stands_before_all_else():
    """In the printed report and the tables. Without a baseline there are no savings."""
    found = made({"mars-m": LOW, "muon": CLEAR})
    first = conclusion(found)[0]
    assert lines(found)[1] == f"found     {first}"
    text = markdown(found)
    assert text.startswith(f"# found\n\n## What was found\n\n{first}\n\n- A note.\n\n`c.toml`: ")
    for shown in (text, "\n".join(lines(found))):
        assert "tokens saved" not in shown and "time saved" not in shown
    assert "betas 0.9 0.99 for all" in text and "| mars-m | lr 0.002, gamma 0.2 |" in text
    assert "| tokens saved |" in markdown(replace(found, baseline="muon"))


def test_seeds_are_counted_and_numbered():
    """A seed whose number is 0 must not read as none."""
    assert seeds_text([0]) == "1 seed (number 0)"
    assert seeds_text([7]) == "1 seed (number 7)"
    assert seeds_text([0, 1, 2]) == "3 seeds (numbers 0 to 2)"
    text = markdown(made({"mars-m": [1.48]}, seeds=1))
    assert "with 1 seed (number 0)." in text and "| seed number |" in text
    assert "with seed 0" not in text and "seeds 0" not in text
