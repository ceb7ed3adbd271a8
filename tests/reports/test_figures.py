"""Figures of runs and of comparisons: what is written in them."""

import re
import warnings
from dataclasses import replace

import numpy as np
import pytest

from tests.support.records import made_comparison, made_run, restarted_run
from torchmars.records.run import Series, read_run
from torchmars.reports.charts import charts_of, short_names
from torchmars.reports.figures import (
    comparison_figure,
    drawn,
    restarts,
    run_names,
    runs_figure,
    smoothed,
    write_files,
)

MAIN = ["Training loss", "Validation loss", "Learning rate", "Tokens per second"]


def texts(figure):
    """The texts in an SVG, which matplotlib draws as shapes and leaves as comments."""
    return [
        line.strip()[5:-4] for line in drawn(figure, "svg").decode().split("\n") if "<!-" in line
    ]


@pytest.fixture
def run(tmp_path):
    return read_run(made_run(tmp_path / "made", 80))


def test_one_run(run, tmp_path):
    """Four panels of one axis, whose files are the same whenever they are written."""
    figure, files = runs_figure([run]), [tmp_path / "new" / name for name in ("a.png", "a.svg")]
    write_files(figure, files)
    assert files[0].read_bytes().startswith(b"\x89PNG")
    before = files[1].read_bytes()
    assert before == drawn(runs_figure([run]), "svg")
    found = texts(figure)
    assert [each for each in found if each in MAIN] == MAIN
    assert "made: step 80 of 80" in found and found.count("step") == 4
    limits = {axes.get_xlim() for axes in figure.axes}
    assert len(limits) == 1 and "restart" not in found


def test_all_of_a_run(run):
    found = texts(runs_figure([run], every=True))
    assert {*MAIN, "Gradient norm", "Time of a step (ms)", "data", "forward"} <= set(found)
    assert "matrix/correction" in found and "Skipped steps so far" not in found


def test_one_point_is_no_panel(tmp_path):
    """A run of one validation, beside one that has it twice, and one without measurements."""
    one, begun = restarted_run(tmp_path / "one"), made_run(tmp_path / "begun", 0)
    assert "Validation loss" not in texts(runs_figure([one]))
    both = [one, read_run(made_run(tmp_path / "two", 20)), read_run(begun)]
    assert {"Validation loss", "begun", "restart"} <= set(texts(runs_figure(both)))
    assert runs_figure(both[2:]) is None
    assert restarts(one) == [40]


def test_names_steer_nothing_and_break_nothing(tmp_path):
    """Neither the terminal, nor the SVG, nor the legend."""
    names = ["a\x1b[31mb", "$\\frac{$", "--><script>", "_under", "漢", "long" * 50, "two\nlines"]
    runs = []
    for name in names:
        folder = made_run(tmp_path / str(len(runs)), 3)
        runs.append(read_run(folder.rename(tmp_path / name)) if "/" not in name else None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure = runs_figure(runs, every=True)
        content = drawn(figure, "svg").decode()
    assert "\x1b" not in content and "<script>" not in content
    shown = [each.get_text() for each in figure.legends[0].get_texts()]
    assert shown == [
        *("a\\x1b[31mb", "$\\frac{$", "--><script>", "_under", "漢"),
        *(("long" * 50)[:59] + "…", "two lines"),
    ]
    assert all(axes.get_window_extent().width > 100 for axes in figure.axes)


def test_runs_are_called_by_the_ends_of_their_paths(tmp_path):
    runs = [restarted_run(tmp_path / name) for name in ("a/same", "b/same", "b/other")]
    assert run_names(runs[1:]) == ["same", "other"]
    assert run_names(runs) == ["a/same", "b/same", "b/other"]
    assert run_names(runs[:1] * 2) == ["1: same", "2: same"]


def test_smoothing_is_the_mean_around_each_row():
    steps, values = np.arange(10, 510), np.random.default_rng(0).normal(size=500)
    values[[0, 250, 251]] = np.nan
    found = smoothed(Series(steps, values))
    assert found.steps.tolist() == steps.tolist() and np.isnan(found.values[0])
    for row, mean in list(enumerate(found.values))[1:]:
        reach = min(7, row, 499 - row)  # 3% of 500 rows
        assert mean == pytest.approx(np.nanmean(values[row - reach : row + reach + 1]))


def test_names_and_order_of_a_legend(run):
    assert short_names(["train/embedding/cosine", "train/matrix/cosine"]) == ["embedding", "matrix"]
    assert short_names(["train/data_ms", "train/forward_ms"]) == ["data", "forward"]
    assert [chart.title for chart in charts_of([run], every=False)] == MAIN


def test_a_comparison():
    found = made_comparison()
    figure = comparison_figure(found)
    said = texts(figure)
    assert {"Validation loss of the best settings", "Final loss by learning rate"} <= set(said)
    assert {"mars-adamw", "adamw", "muon", "2 M", "0.003"} <= set(said)
    assert "optimizers: 4.92M tokens a trial" in said
    # Two diverged at the highest rate: a cross each.
    crosses = [line for line in figure.axes[1].lines if line.get_marker() == "x"]
    assert [list(line.get_xdata()) for line in crosses] == [[0.03]] * 2
    colors = set(re.findall("#[0-9a-f]{6}", drawn(figure, "svg").decode()))
    assert "#808080" in colors and not {"#ffffff", "#000000"} & colors


def test_a_comparison_has_no_panel_without_a_curve():
    found = made_comparison()
    pending = [replace(each, state="pending", loss=None) for each in found.trials]
    assert comparison_figure(replace(found, trials=pending)) is None
    one_rate = [each for each in found.trials if each.settings["lr"] == 0.003]
    figure = comparison_figure(replace(found, trials=one_rate))
    assert [axes.get_title() for axes in figure.axes] == ["Validation loss of the best settings"]
