"""Pictures of runs."""

import re

import pytest
from matplotlib.figure import Figure

from tests.support.full import FULL
from tests.support.records import restarted_run
from torchmars.core.errors import UserError
from torchmars.records.run import read_run
from torchmars.reports.charts import charts_of, in_time, names_measured, short_names
from torchmars.reports.plots import draw, event_steps, plot_runs


def texts(svg):
    """The texts in an SVG, which matplotlib draws as shapes and leaves as comments."""
    return [line.strip()[5:-4] for line in svg.read_text().splitlines() if "<!--" in line]


def test_one_run(tmp_path):
    run = restarted_run(tmp_path / "one")
    files = [tmp_path / "new" / "plot.png", tmp_path / "new" / "plot.svg"]
    plot_runs([run], "tokens", files)
    assert files[0].read_bytes().startswith(b"\x89PNG")
    found = texts(files[1])
    panels = {"Training loss", "Validation loss", "Gradient norm", "Tokens per second"}
    assert {*panels, "Time of a step (ms)", "data", "forward", "one"} <= set(found)
    assert {"restart", "rollback"} <= set(found) and found.count("tokens") == 5
    # It has neither measured nor skipped.
    assert not {"Clip rate (share of tensors)", "Skipped steps (so far)"} & set(found)
    before = files[1].read_bytes()
    plot_runs([run], "tokens", files)
    assert files[1].read_bytes() == before


def test_several_runs_over_one_another(tmp_path):
    clipped = {"train/matrix/clipped": 0.5, "train/embedding/clipped": 0.0}
    runs = [
        restarted_run(tmp_path / "a" / "same"),
        restarted_run(tmp_path / "b" / r"$\frac{$", 3),
        restarted_run(tmp_path / "b" / "same", 30, **clipped),
        restarted_run(tmp_path / "b" / "other", 1, **{"train/skipped_steps": 1}),
    ]
    for along, label in (("step", "step"), ("seconds", "minutes of training")):
        plot_runs(runs, along, [tmp_path / "plot.svg"])
        found = texts(tmp_path / "plot.svg")
        assert {str(run.folder) for run in runs[:3:2]} | {"other", r"$\frac{$"} <= set(found)
        assert {"matrix", "embedding", "Skipped steps (so far)"} <= set(found)
        # The time of a step is a bar for each run.
        assert found.count(label) == len([each for each in found if "(ms)" in each]) * 6


@pytest.mark.parametrize("count", [1, 2])
def test_no_legend_covers_a_curve(count, tmp_path):
    """Neither of lines, nor of areas, which one run has, nor of the bars of several."""
    clipped = {"train/matrix/clipped": 0.5, "train/embedding/clipped": 0.0}
    runs = [restarted_run(tmp_path / str(number), **clipped) for number in range(count)]
    legends = 0
    for chart in charts_of(names_measured(runs))[0]:
        axes = Figure(layout="constrained").subplots()
        draw(chart, runs, "tokens", axes)
        axes.figure.draw_without_rendering()
        if legend := axes.get_legend():
            assert legend.get_window_extent().y1 <= axes.xaxis.get_tightbbox().y0
            legends += 1
    assert legends == 2


def test_a_picture_is_drawn_on_nothing_in_gray(tmp_path):
    """It can be read on a dark page."""
    plot_runs([restarted_run(tmp_path / "one")], "tokens", [tmp_path / "plot.svg"])
    found = (tmp_path / "plot.svg").read_text()
    assert "#808080" in found and not {"#ffffff", "#000000"} & set(
        re.findall("#[0-9a-f]{6}", found)
    )


def test_a_run_without_metrics_is_a_mistake(tmp_path):
    run = restarted_run(tmp_path / "run")
    (run.folder / "metrics.jsonl").write_text("")
    with pytest.raises(UserError, match="has no metrics yet"):
        plot_runs([run], "tokens", [tmp_path / "plot.svg"])
    assert not (tmp_path / "plot.svg").exists()


@FULL
def test_a_run_that_has_not_reported_yet_is_drawn_beside_others(tmp_path):
    runs = [restarted_run(tmp_path / "one"), restarted_run(tmp_path / "begun")]
    (runs[1].folder / "metrics.jsonl").unlink()
    for along in ("tokens", "step", "seconds"):
        plot_runs([runs[0], read_run(runs[1].folder)], along, [tmp_path / "plot.svg"])
        assert "begun" in texts(tmp_path / "plot.svg")


def test_restarts_are_all_starts_but_the_first(tmp_path):
    run = restarted_run(tmp_path / "run")
    assert event_steps(run, "restart").tolist() == [40]
    assert event_steps(run, "rollback").tolist() == [60]


def test_names_and_order_of_a_legend():
    assert short_names(["train/embedding/cosine", "train/matrix/cosine"]) == ["embedding", "matrix"]
    assert short_names(["train/data_ms", "train/other_ms"]) == ["data", "other"]
    names = ["train/other_ms", "train/backward_ms", "train/data_ms", "train/new_ms"]
    assert [name[6:] for name in sorted(names, key=in_time)] == [
        "data_ms",
        "backward_ms",
        "other_ms",
        "new_ms",
    ]
