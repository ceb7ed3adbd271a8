"""The best rates of sizes: the parabola, and what tables, sentences and the page say of them."""

from dataclasses import asdict, replace

import numpy as np
import pytest

from torchmars.comparison.conclusion import conclusion
from torchmars.comparison.rates import lowest
from torchmars.comparison.results import (
    Comparison,
    ContenderResult,
    LossCurve,
    TrialResult,
    read_comparison,
    write_comparison,
)
from torchmars.comparison.tables import csv_text, lines, markdown
from torchmars.core.typed import make
from torchmars.reports.figures import comparison_figure
from torchmars.reports.page import comparison_page

RATES = [0.01, 0.02, 0.04]
# Symmetric about 0.02; lowest at 0.02 * 2^(1/6); at an end.
LOSSES = {"width32": [3.0, 2.0, 3.0], "width64": [2.5, 1.5, 2.0], "width64-without": [1.0, 2.0, 3]}


@pytest.mark.parametrize("rates", [(1e-3, 2e-3, 4e-3), (1e-3, 3e-3, 4e-3), (2.0, 3.0, 50.0)])
def test_the_best_rate_is_that_of_a_parabola(rates):
    generator = np.random.default_rng(0)
    for _ in range(20):
        middle, left, right = generator.uniform(1, 2, 3)
        losses = [middle + left, middle, middle + right]
        a, b, _ = np.polyfit(np.log(rates), losses, 2)
        found = lowest({0.5 * rates[0]: 9.0, **dict(zip(rates, losses)), 2 * rates[-1]: 9.0})
        assert found == pytest.approx(np.exp(-b / (2 * a)), rel=1e-6)
        assert rates[0] < found < rates[2]


def test_a_rate_at_an_end_is_none():
    assert lowest({1.0: 1.0, 2.0: 2.0, 4.0: 3.0}) is lowest({1.0: 3.0, 2.0: 2.0, 4.0: 1.0}) is None
    assert lowest({}) is lowest({1.0: 1.0}) is None
    assert lowest({1.0: 2.0, 2.0: 2.0, 4.0: 2.0}) is None  # the first of equals
    assert lowest({1.0: 3.0, 2.0: 2.0, 4.0: 2.0, 8.0: 2.0}) == pytest.approx(2 * 2**0.5)


@pytest.fixture
def sizes():
    """A study of sizes with one seed, all of it done."""
    trials = [
        TrialResult(name, name, {"lr": rate}, 0, "done", "", loss, 1.0, LossCurve([], [], []), name)
        for name, losses in LOSSES.items()
        for rate, loss in zip(RATES, map(float, losses))
    ]
    found = [
        ContenderResult(name, "muon", {"lr": 0.02}, {}, [min(own)], min(own), None, None, None, "")
        for name, own in LOSSES.items()
    ]
    found.sort(key=lambda each: each.losses)
    more = ([0], 7, 70, None, found, [], trials, [])
    return Comparison("found", ["c.toml"], {"lr": [*RATES]}, *more, kind="size")


def test_sizes_are_called_so_in_words_and_tables(sizes):
    assert conclusion(sizes)[:2] == [
        "width32, the base, is best at the rate 0.02.",
        "Of width64 it is 1.12 times that, of width64-without it is not known.",
    ]
    text, shown = markdown(sizes), "\n".join(lines(sizes))
    assert "| width64 | 0.0224 | - | 1.5000 | 0.0000 |" in text
    assert "| width64-without | - | - | 1.0000 | 1.0000 |" in text
    assert "## Sizes" in text and "## Trials\n\n| size |" in text and "size " in shown
    assert csv_text(sizes).startswith("size,lr,")
    for said in (text, shown, csv_text(sizes)):
        assert "optimizer" not in said.lower() and "saved" not in said
    at_end = replace(sizes, trials=sizes.trials[6:])
    message = "width64-without, the base, has no best rate: its lowest loss is at an end"
    assert conclusion(at_end)[0].startswith(message)
    pending = replace(sizes.trials[-1], state="pending", loss=None)
    assert conclusion(replace(sizes, trials=[*sizes.trials, pending]))[0].startswith("So far: widt")
    nothing = replace(sizes, contenders=[], trials=[pending])
    assert conclusion(nothing) == ["Nothing yet: no size is tuned."]


def test_the_page_has_a_line_for_each_size(sizes):
    (legend,) = comparison_figure(sizes).legends
    assert sorted(each.get_text() for each in legend.get_texts()) == sorted(LOSSES)
    text = comparison_page(sizes)
    body = text[text.index("<body") :].lower()
    assert "width64-without" in body and "optimizer" not in body and ">differences<" not in body


def test_results_keep_what_was_compared_and_older_ones_are_of_optimizers(sizes, tmp_path):
    write_comparison(sizes, tmp_path)
    assert read_comparison(tmp_path) == sizes
    tables = asdict(sizes)
    del tables["kind"]
    assert make(Comparison, tables).kind == "optimizer"
