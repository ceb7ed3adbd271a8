"""What the tables of a comparison say: differences, savings, seeds, and the best rates of sizes."""

import statistics
from dataclasses import replace

import numpy as np
import pytest

from torchmars.comparison.results import (
    Comparison,
    ContenderResult,
    Estimate,
    LossCurve,
    TrialResult,
    read_comparison,
    write_comparison,
)
from torchmars.comparison.summary import differences
from torchmars.comparison.tables import (
    best_rate,
    csv_text,
    difference_rows,
    interval_text,
    lines,
    markdown,
    seeds_text,
    share,
)
from torchmars.reports.figures import comparison_figure
from torchmars.reports.page import comparison_page

GRID = {"lr": [1e-3, 2e-3], "gamma": [0.1, 0.2], "betas": [[0.9, 0.99]]}
BEST = {"lr": 2e-3, "gamma": 0.2, "betas": [0.9, 0.99]}
# Of two of these the interval is 0.0227 on both sides: with variances of 1e-4 and 4 degrees of
# freedom it is 2.77645 (Student's quantile, from a table) times the root of 2e-4 / 3.
LOW, NEAR, CLEAR = [1.47, 1.48, 1.49], [1.48, 1.49, 1.5], [1.5, 1.51, 1.52]
RATES = [0.01, 0.02, 0.04]
# Symmetric about 0.02; lowest at 0.02 * 2^(1/6); at an end.
LOSSES = {"width32": [3.0, 2.0, 3.0], "width64": [2.5, 1.5, 2.0], "width64-without": [1.0, 2.0, 3]}


def made(losses, baseline=None, seeds=3):
    """A comparison whose contenders have these losses, by name, the best first."""
    means = {name: statistics.fmean(own) if own else None for name, own in losses.items()}
    contenders = [
        ContenderResult(name, name, own and BEST, {}, own, means[name], None, None, "unknown")
        for name, own in losses.items()
    ]
    trials = [
        TrialResult("", name, BEST, 0, "done", "", 1.0, LossCurve([], []), "trials/a")
        for name in losses
    ]
    pairs = differences(contenders, baseline)
    seeds = list(range(seeds))
    more = (7, 70, baseline, contenders, pairs, trials)
    return Comparison("found", ["c.toml"], GRID, seeds, *more, "optimizer")


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


def test_of_each_pair_a_difference_is_shown_or_not():
    """Where the best is the baseline, the table has the other one minus it."""
    text = markdown(made({"mars-m": LOW, "muon": CLEAR, "lion": NEAR}, "muon"))
    for row in (
        "| mars-m - muon | -0.0300 | -0.0527 to -0.0073 | shown |",
        "| lion - muon | -0.0200 | -0.0427 to +0.0027 | not shown |",
        "| mars-m - lion | -0.0100 | -0.0327 to +0.0127 | not shown |",
    ):
        assert row in text
    turned = markdown(made({"mars-m": LOW, "muon": CLEAR}, "mars-m"))
    assert "| muon - mars-m | +0.0300 | +0.0073 to +0.0527 | shown |" in turned


def test_one_seed_shows_nothing():
    text = markdown(made({"mars-m": [1.48], "muon": [1.5]}, seeds=1))
    assert "| mars-m - muon | -0.0200 | - | not shown |" in text
    assert "with 1 seed (number 0)." in text and "| seed number |" in text


def test_seeds_are_counted_and_numbered():
    """A seed whose number is 0 must not read as none."""
    assert seeds_text([0]) == "1 seed (number 0)"
    assert seeds_text([7]) == "1 seed (number 7)"
    assert seeds_text([0, 1, 2]) == "3 seeds (numbers 0 to 2)"


def test_a_row_tells_of_seeds_that_are_lost_and_of_values_at_an_end():
    found = made({"mars-m": LOW[:2], "muon": CLEAR})
    best = replace(found.contenders[0], edges={"lr": "highest", "betas[0]": "lowest"})
    lost = replace(found.trials[0], state="diverged", loss=None)
    trials = [*found.trials, lost]
    found = replace(found, contenders=[best, found.contenders[1]], trials=trials)
    text = markdown(found)
    own = "| mars-m | lr 0.002, gamma 0.2 | 1.4750 | - | 2 of 3 | lr highest, betas[0] lowest |\n"
    assert own in text and "| muon | lr 0.002, gamma 0.2 | 1.5100 | - | 3 | - |\n" in text
    assert "betas 0.9 0.99 for all" in text and lines(found)[-1] == "trials: 2 done, 1 diverged"
    # Without a baseline there are no savings.
    assert "tokens saved" not in text and "| tokens saved |" in markdown(
        replace(found, baseline="muon")
    )


@pytest.mark.parametrize("rates", [(1e-3, 2e-3, 4e-3), (1e-3, 3e-3, 4e-3), (2.0, 3.0, 50.0)])
def test_the_best_rate_is_that_of_a_parabola(rates):
    """Of the parabola through three points, in Lagrange's form, the slope is 0 there."""
    generator = np.random.default_rng(0)
    x0, x1, x2 = np.log(rates)
    for _ in range(20):
        middle, left, right = generator.uniform(1, 2, 3)
        y0, y1, y2 = middle + left, middle, middle + right
        found = best_rate({0.5 * rates[0]: 9.0, **dict(zip(rates, (y0, y1, y2))), 2 * rates[2]: 9})
        x = np.log(found)
        slope = y0 * (2 * x - x1 - x2) / ((x0 - x1) * (x0 - x2))
        slope += y1 * (2 * x - x0 - x2) / ((x1 - x0) * (x1 - x2))
        slope += y2 * (2 * x - x0 - x1) / ((x2 - x0) * (x2 - x1))
        assert slope == pytest.approx(0, abs=1e-6) and rates[0] < found < rates[2]


def test_a_rate_at_an_end_is_none():
    assert best_rate({1.0: 1.0, 2.0: 2.0, 4.0: 3.0}) is None
    assert best_rate({1.0: 3.0, 2.0: 2.0, 4.0: 1.0}) is None
    assert best_rate({}) is best_rate({1.0: 1.0}) is None
    assert best_rate({1.0: 2.0, 2.0: 2.0, 4.0: 2.0}) is None  # the first of equals
    assert best_rate({1.0: 3.0, 2.0: 2.0, 4.0: 2.0, 8.0: 2.0}) == pytest.approx(2 * 2**0.5)


def test_sizes_are_called_so_in_the_tables(tmp_path):
    trials = [
        TrialResult(name, name, {"lr": rate}, 0, "done", "", loss, LossCurve([], []), name)
        for name, losses in LOSSES.items()
        for rate, loss in zip(RATES, map(float, losses))
    ]
    found = [
        ContenderResult(name, "muon", {"lr": 0.02}, {}, [min(own)], min(own), None, None, "")
        for name, own in LOSSES.items()
    ]
    found.sort(key=lambda each: each.losses)
    more = ([0], 7, 70, None, found, [], trials, "size")
    sizes = Comparison("found", ["c.toml"], {"lr": [*RATES]}, *more)
    text, shown = markdown(sizes), "\n".join(lines(sizes))
    assert "| width32 | 0.02 | - | 2.0000 | 0.0000 |" in text
    assert "| width64 | 0.0224 | - | 1.5000 | 0.0000 |" in text
    assert "| width64-without | - | - | 1.0000 | 1.0000 |" in text
    assert "## Sizes" in text and "| size | lr | seed number |" in text and "size " in shown
    assert csv_text(sizes).startswith("size,lr,")
    for said in (text, shown, csv_text(sizes)):
        assert "optimizer" not in said.lower() and "saved" not in said
    nothing = replace(sizes, trials=[replace(trials[0], state="pending", loss=None)])
    assert "| width32 | - | - | - | - |" in markdown(nothing)
    (legend,) = comparison_figure(sizes).legends
    assert sorted(each.get_text() for each in legend.get_texts()) == sorted(LOSSES)
    page = comparison_page(sizes)
    body = page[page.index("<body") :].lower()
    assert "width64-without" in body and "optimizer" not in body and ">differences<" not in body
    write_comparison(sizes, tmp_path)
    assert read_comparison(tmp_path) == sizes
