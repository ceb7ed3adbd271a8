"""The page of a comparison: what it says, and that a browser draws it."""

import dataclasses

import pytest

from tests.support.browser import ALL_IN_VIEW_DRAWN, browser, draw, open_page
from tests.support.full import FULL
from tests.support.records import compared_planes, made_comparison, made_run
from torchmars.reports.comparison_figures import by_lr
from torchmars.reports.comparison_page import comparison_page, link

pytest.importorskip("plotly")


def test_links_of_trials(tmp_path):
    run = made_run(tmp_path / "trials" / "a b#c", 1)
    assert link(run, tmp_path / "report.html") == "trials/a%20b%23c"
    (run / "report.html").touch()
    assert link(run, tmp_path / "pages" / "x.html") == "../trials/a%20b%23c/report.html"


def test_before_anything_is_done(tmp_path):
    """All trials are pending, and no contender has a result."""
    found = made_comparison()
    nothing = {"best": None, "losses": [], "mean": None, "spread": None}
    nothing |= {"tokens_saved": None, "seconds_saved": None}
    pending = {"state": "pending", "loss": None, "seconds": None}
    found = dataclasses.replace(
        found,
        contenders=[dataclasses.replace(each, **nothing) for each in found.contenders],
        trials=[dataclasses.replace(each, **pending) for each in found.trials],
        differences=[],
        baseline=None,
    )
    text = comparison_page(found, tmp_path, tmp_path / "report.html", 20)
    assert f"{len(found.trials)} pending" in text and 'data-every="20"' in text


def test_equal_losses_at_one_learning_rate():
    found = compared_planes()
    tied = [dataclasses.replace(each, loss=each.loss and 1.5) for each in found.trials]
    figure = by_lr(dataclasses.replace(found, trials=tied))
    lines = [trace for trace in figure.traces if trace["style"] == "line"]
    assert [(trace["x"], trace["y"]) for trace in lines] == [([0.01, 0.02], [1.5, 1.5])] * 2
    dots = [trace for trace in figure.traces if trace["style"] == "dots"]
    assert [len(trace["x"]) for trace in dots] == [5, 2]


@FULL
def test_in_a_browser(tmp_path):
    file = tmp_path / "report.html"
    text = comparison_page(made_comparison(), tmp_path, file)
    assert "mars-adamw - adamw" in text and "23.0% (15.0% to 31.0%)" in text
    file.write_text(text)
    with browser() as started:
        opened = open_page(started, file, viewport={"width": 390, "height": 844})
        page = opened.page
        page.locator("summary").click()
        for figure in page.locator("figure").all():
            figure.scroll_into_view_if_needed()
            opened.wait(ALL_IN_VIEW_DRAWN)
        drawn = page.evaluate("plots.map(plot => plot.data.filter(each => each.x.length).length)")
        # lr: 3 contenders, 2 of which have trials that diverged. Then lines of 9 seeds, twice.
        assert drawn[:3] == [5, 9, 9] and min(drawn) > 0
        page.get_by_role("checkbox", name="muon").uncheck()
        draw(opened, ["Final loss against learning rate"])
        assert page.evaluate("plots[0].data.filter(each => each.x.length).length") == 4
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        assert opened.messages == [] and opened.requests == [file.as_uri()]


@FULL
def test_betas_and_gamma_in_a_browser(tmp_path):
    """A map of each contender: that of the rule without gamma is one column, as wide as all."""
    file = tmp_path / "report.html"
    file.write_text(comparison_page(compared_planes(), tmp_path, file))
    with browser() as started:
        opened = open_page(started, file, viewport={"width": 390, "height": 844})
        draw(opened, ["Final loss by betas and gamma"])
        assert opened.page.evaluate("plots[1].data.map(({ text, dx }) => [text, dx])") == [
            [[["1.4700", "<b>1.4200</b>", "1.4600"], ["1.4900", "×", ""]], 1],
            [[["<b>1.4400</b>"], ["1.4800"]], 3],
        ]
        for name, left in (("mars-m", 1), ("muon", 0)):
            opened.page.get_by_role("checkbox", name=name).uncheck()
            draw(opened, ["Final loss by betas and gamma"])
            opened.wait(f"plots[1].data.length === {left}")
        assert opened.messages == []
