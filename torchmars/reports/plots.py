"""A picture of runs by matplotlib: a panel for each of their charts."""

import math
from pathlib import Path
from typing import Any, Literal

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter
from numpy.typing import NDArray

from torchmars.core.errors import UserError, file_errors
from torchmars.records.run import Along, Run
from torchmars.reports.charts import LOSS, Chart, charts_of, names_measured, run_names
from torchmars.reports.page import PageFigure
from torchmars.reports.run_figures import figure_of

COLUMNS = 3
PANEL = (4.8, 3.1)  # inches
DOTS_PER_INCH = 130
# So few values are drawn as points too.
FEW = 40
# A loss falls far in this part of a run. What is higher there than later is cut off.
START = 0.05
# Times of a step higher than this share of all are cut off: the first one may compile.
HIGHEST = 0.98
LOG = "Gradient norm"  # the chart whose values are of different orders
# The dashes of the measurements in a chart of several runs, and of what happened to runs.
Dashes = Literal["-", "--", ":", "-."]
DASHES: tuple[Dashes, ...] = ("-", "--", ":", "-.")
EVENTS: dict[str, Dashes] = {"restart": ":", "rollback": "--"}
MOST_LINES = 100  # of each kind of event of a run
# Words and axes are gray on nothing: they can be read on a light page and on a dark one.
GRAY = "gray"
STYLE: dict[Any, Any] = {
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "text.color": GRAY,
    "axes.edgecolor": GRAY,
    "axes.labelcolor": GRAY,
    "xtick.color": GRAY,
    "ytick.color": GRAY,
}


def plot_runs(runs: list[Run], along: Along, files: list[Path]) -> None:
    """Draw a panel for each chart that one of `runs` has, and write the picture to `files`.

    Raises `UserError` if there is nothing to draw, or a file cannot be written.
    """
    charts, _ = charts_of(names_measured(runs))
    if not charts:
        raise UserError(f"{runs[0].folder} has no metrics yet: wait for its first report")
    rows, columns = math.ceil(len(charts) / COLUMNS), min(COLUMNS, len(charts))
    # The same curves make the same SVG, without names by chance and without its date. Names with
    # dollars are no formulas.
    with matplotlib.rc_context(
        {**STYLE, "svg.hashsalt": "torchmars", "font.size": 9, "text.parse_math": False}
    ):
        figure = Figure(figsize=(PANEL[0] * columns, PANEL[1] * rows + 0.5), layout="constrained")
        panels = list(figure.subplots(rows, columns, squeeze=False).flat)
        for chart, axes in zip(charts, panels):
            draw(chart, runs, along, axes)
        for axes in panels[len(charts) :]:
            axes.remove()
        add_legend(runs, figure)
        for file in files:
            with file_errors(f"--out: cannot write {file}"):
                file.parent.mkdir(parents=True, exist_ok=True)
                without_date = {"Date": None} if file.suffix.lower() == ".svg" else None
                figure.savefig(file, dpi=DOTS_PER_INCH, metadata=without_date)


def add_legend(runs: list[Run], figure: Figure) -> None:
    """Say above all panels which line is which run, and what the vertical lines are."""
    lines = [
        Line2D([], [], color=color(number), linestyle=DASHES[number // 10 % len(DASHES)])
        for number in range(len(runs))
    ]
    names = run_names(runs)
    for event, dashes in EVENTS.items():
        if any(len(event_steps(run, event)) for run in runs):
            lines.append(Line2D([], [], color=GRAY, linestyle=dashes))
            names.append(event)
    figure.legend(lines, names, loc="outside upper center", ncols=6, frameon=False)


def draw(chart: Chart, runs: list[Run], along: Along, axes: Axes) -> None:
    """Draw a chart of all runs into a panel."""
    axes.set_title(f"{chart.title} ({chart.unit})" if chart.unit else chart.title, fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    figure = figure_of(chart, runs, run_names(runs), [])
    if chart.stacked and len(runs) > 1:
        draw_bars(figure, axes)
        return
    if chart.stacked:
        draw_areas(figure, runs[0], along, axes)
    else:
        draw_lines(figure, runs, along, axes)
        limit_axis(chart, runs, axes)
    mark_events(runs, along, axes)
    label_axis(runs, along, axes)


def draw_lines(figure: PageFigure, runs: list[Run], along: Along, axes: Axes) -> None:
    """Draw the curves of a chart: those that are smoothed pale, and their means."""
    labels: dict[str, Line2D] = {}
    for trace in figure.traces:
        where = run_along(runs[trace["run"]], along, trace)
        values, shade = np.array(trace["y"], dtype=np.float64), color(trace["color"])
        dashes = DASHES[trace["dash"] % len(DASHES)]
        if trace["style"] == "pale":
            axes.plot(where, values, color=shade, alpha=0.35, linewidth=0.7)
            continue
        marker = "." if len(values) <= FEW else ""
        axes.plot(where, values, color=shade, linestyle=dashes, marker=marker, linewidth=1.3)
        shade = GRAY if len(runs) > 1 else shade
        labels.setdefault(trace["name"], Line2D([], [], color=shade, linestyle=dashes))
    if len(labels) > 1:
        legend_below(axes, labels.values(), labels)


def legend_below(axes: Axes, *lines_and_names: Any) -> None:
    """Say below a panel what its lines or areas are: within it they would be covered."""
    # Below the axis's own label.
    where: dict[str, Any] = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.18)}
    axes.legend(*lines_and_names, **where, ncols=6, fontsize=7, frameon=False)


def run_along(run: Run, along: Along, trace: dict[str, Any]) -> NDArray[np.float64]:
    """Return where the points of a trace are on an axis."""
    return run.along(along, np.array(trace["x"], dtype=np.int64))


def limit_axis(chart: Chart, runs: list[Run], axes: Axes) -> None:
    """Give a panel a log axis, or cut off what is higher only at the start of a run."""
    if chart.title == LOG:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
    elif chart.title == LOSS.title:
        losses = [run.series[LOSS.pattern].values for run in runs if LOSS.pattern in run.series]
        later = np.concatenate([values[int(START * len(values)) :] for values in losses])
        if np.isfinite(later).any():
            axes.set_ylim(top=1.02 * np.nanmax(later))


def draw_areas(figure: PageFigure, run: Run, along: Along, axes: Axes) -> None:
    """Draw the parts of a whole over one another."""
    heights = [np.array(trace["y"], dtype=np.float64) for trace in figure.traces]
    names = [trace["name"] for trace in figure.traces]
    axes.stackplot(run_along(run, along, figure.traces[0]), heights, labels=names, alpha=0.85)
    axes.set_ylim(0, 1.05 * float(np.quantile(np.sum(heights, axis=0), HIGHEST)))
    legend_below(axes)


def draw_bars(figure: PageFigure, axes: Axes) -> None:
    """Draw the parts of a whole as a bar for each run."""
    begins = np.zeros(len(figure.y["ticktext"]))
    for trace in figure.traces:
        (row,), (length,), first = trace["y"], trace["x"], trace["run"] == 0
        label, shade = trace["name"] if first else None, color(trace["color"])
        axes.barh(row, length, left=begins[row], color=shade, label=label, alpha=0.85)
        begins[row] += length
    axes.set_yticks(figure.y["tickvals"], figure.y["ticktext"])
    axes.invert_yaxis()
    legend_below(axes)


def mark_events(runs: list[Run], along: Along, axes: Axes) -> None:
    """Mark where runs were started again, and where they went back to."""
    for number, run in enumerate(runs):
        shade = color(number) if len(runs) > 1 else GRAY
        for event, dashes in EVENTS.items():
            steps = event_steps(run, event)
            kept = np.linspace(0, len(steps) - 1, min(len(steps), MOST_LINES)).astype(np.int64)
            for where in run.along(along, steps[kept]):
                axes.axvline(where, color=shade, linestyle=dashes, linewidth=0.9, alpha=0.7)


def event_steps(run: Run, event: str) -> NDArray[np.int64]:
    """Return the steps at which something of `EVENTS` happened to a run."""
    kind = "started" if event == "restart" else event
    steps = [each.step for each in run.events if each.kind == kind]
    return np.array(steps[1:] if event == "restart" else steps, dtype=np.int64)


def label_axis(runs: list[Run], along: Along, axes: Axes) -> None:
    """Give a panel the x axis of all: from 0 to where the last run ends, in numbers as 5 M."""
    end = max(run.along(along, np.array([run.last_step]))[0] for run in runs)
    axes.set_xlim(-0.02 * end, 1.02 * end or None)
    axes.set_xlabel(along)
    if along == "seconds":
        unit, size = ("hours", 3600) if end >= 7200 else ("minutes", 60)
        unit, size = ("seconds", 1) if end < 300 else (unit, size)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value / size:g}")
        axes.set_xlabel(f"{unit} of training")
    else:
        axes.xaxis.set_major_formatter(EngFormatter(sep=" "))


def color(number: int) -> str:
    """Return the color of a run or, in a chart of one run, of a measurement."""
    return f"C{number % 10}"
