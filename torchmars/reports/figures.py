"""Figures of runs and of comparisons by matplotlib: as PNG and SVG, and on pages."""

import io
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator, NullFormatter
from numpy.typing import NDArray

from torchmars.comparison.results import Comparison
from torchmars.core.console import harmless
from torchmars.core.errors import file_errors
from torchmars.core.files import write_durably
from torchmars.core.words import short
from torchmars.records.run import Run, Series
from torchmars.reports.charts import LOSS, Chart, charts_of, short_names

PANEL = (4.8, 2.9)  # inches
TITLE, LEGEND = 0.6, 0.2  # inches for the title, and for a row of the legend
DOTS_PER_INCH = 130
# So few values are drawn as points too.
FEW = 40
# A curve of more rows than NOISY is smoothed: each value is the mean over this SHARE of all rows.
# Of more runs than PALE the rows themselves are left out.
NOISY, SHARE, PALE = 60, 0.03, 6
# A loss falls far in this part of a run. What is higher there than later is cut off.
START = 0.1
LONGEST = 60  # letters of a name: so many fit below a panel
MOST_RATES = 8  # that are written below their axis
# The dashes of the measurements in a chart of several runs. Those of restarts are dotted.
Dashes = Literal["-", "--", "-."]
DASHES: tuple[Dashes, ...] = ("-", "--", "-.")
# Words and axes are gray on nothing: they can be read on a light page and on a dark one.
GRAY = "gray"
STYLE: dict[Any, Any] = {
    **{"figure.facecolor": "none", "axes.facecolor": "none", "text.color": GRAY},
    **{"axes.edgecolor": GRAY, "axes.labelcolor": GRAY, "xtick.color": GRAY, "ytick.color": GRAY},
    **{"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25},
    **{"font.size": 9, "axes.titlesize": 10, "legend.frameon": False},
    **{"figure.constrained_layout.h_pad": 0.1, "figure.constrained_layout.w_pad": 0.08},
    # Names with dollars are no formulas. The same curves make the same SVG.
    **{"text.parse_math": False, "svg.hashsalt": "torchmars"},
}
# Without dates, for the same reason.
ABOUT: dict[str, dict[str, None]] = {"png": {"Software": None}, "svg": {"Date": None}}
Draw = Callable[[Axes], None]


def runs_figure(runs: Sequence[Run], every: bool = False) -> Figure | None:
    """Return a panel for each of the main charts that `runs` have, or for `every` one.

    None: nothing was measured twice yet.
    """
    charts = charts_of(runs, every)
    names = run_names(runs)
    handles = [
        Line2D([], [], color=color(number), linestyle=DASHES[number // 10 % len(DASHES)])
        for number in range(len(runs))
    ]
    legend = dict(zip(names, handles)) if len(runs) > 1 else {}
    if any(len(restarts(run)) for run in runs):
        legend["restart"] = Line2D([], [], color=GRAY, linestyle=":")
    draws = [partial(draw_chart, chart, runs) for chart in charts]
    step = f": step {runs[0].last_step:,} of {runs[0].steps:,}" if len(runs) == 1 else ""
    return panels(title_of(names) + step, legend, draws, 3 if every else 2)


def comparison_figure(found: Comparison) -> Figure | None:
    """Return a panel of validation curves and one of learning rates. None: no trial is done yet."""
    draws: list[Draw] = []
    legend = {
        label(each.name): Line2D([], [], color=color(found.place_of(each)))
        for each in found.contenders
    }
    if any(len(each.curve.losses) > 1 for each in found.trials if each.state == "done"):
        draws.append(partial(draw_curves, found))
    if len({each.settings["lr"] for each in found.trials if each.loss is not None}) > 1:
        draws.append(partial(draw_rates, found))
    title = f"{label(found.name)}: {short(found.tokens)} tokens a trial"
    return panels(title, legend, draws, 2)


@contextmanager
def style() -> Iterator[None]:
    """Draw in the style of all figures. What is decorated with it also does."""
    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        # The font has no letter for it. The warning would print the letter itself, whichever it is.
        warnings.filterwarnings("ignore", message="Glyph")
        yield


@style()
def panels(
    title: str, legend: dict[str, Line2D], draws: Sequence[Draw], columns: int
) -> Figure | None:
    """Return a figure with a panel for each of `draws`; None if there are none."""
    if not draws:
        return None
    columns = min(columns, len(draws))
    rows, width = math.ceil(len(draws) / columns), PANEL[0] * columns
    height = PANEL[1] * rows + TITLE + LEGEND * math.ceil(len(legend) / columns)
    figure = Figure(figsize=(width, height), layout="constrained")
    figure.suptitle(title, fontsize=12)
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for draw, panel in zip(draws, axes):
        draw(panel)
    for panel in axes[len(draws) :]:
        panel.remove()
    if legend:
        figure.legend(legend.values(), legend, loc="outside lower center", ncols=columns)
    # Where all is stays as it is now: laid out again, some would move a little.
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    return figure


def write_files(content: Figure | str, files: list[Path]) -> None:
    """Write a figure, or the text of a page, to `files`. Raises `UserError`."""
    for file in files:
        data = content if isinstance(content, str) else drawn(content, file.suffix[1:].lower())
        with file_errors(f"--out: cannot write {file}"):
            file.parent.mkdir(parents=True, exist_ok=True)
            write_durably(file, data)


@style()
def drawn(figure: Figure, kind: str) -> bytes:
    """Return the content of a figure's file. `kind` is png or svg."""
    content = io.BytesIO()
    figure.savefig(content, format=kind, dpi=DOTS_PER_INCH, metadata=ABOUT[kind])
    return content.getvalue()


def draw_chart(chart: Chart, runs: Sequence[Run], axes: Axes) -> None:
    """Draw a chart of all runs into a panel. The panels of a figure have the same steps."""
    axes.set_title(label(chart.title))
    draw_lines(chart, runs, axes)
    for number, run in enumerate(runs):
        shade = color(number) if len(runs) > 1 else GRAY
        for step in restarts(run):
            axes.axvline(step, color=shade, linestyle=":", linewidth=0.9, alpha=0.7)
    end = max(run.last_step for run in runs)
    axes.set_xlim(-0.02 * end, 1.02 * end)
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10], integer=True))
    axes.xaxis.set_major_formatter(EngFormatter(sep=" "))
    axes.set_xlabel("step")
    if chart.log:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter("{x:,g}")
    if chart.from_zero:
        axes.set_ylim(bottom=0)
    if chart.pattern == LOSS.pattern:
        losses = [run.series[LOSS.pattern].values for run in runs if LOSS.pattern in run.series]
        cut_start(losses, axes)


def draw_lines(chart: Chart, runs: Sequence[Run], axes: Axes) -> None:
    """Draw the curves of a chart: those that are smoothed pale, and their means."""
    labels: dict[str, Line2D] = {}
    for at, (name, short_name) in enumerate(zip(chart.names, short_names(chart.names))):
        for number, run in enumerate(runs):
            if name not in run.series:
                continue
            series, alone = run.series[name], len(runs) == 1
            shade = color(at if alone else number)
            dashes = DASHES[0 if alone else (at + number // 10) % len(DASHES)]
            if chart.smooth and len(series.steps) > NOISY:
                if len(runs) <= PALE:
                    axes.plot(series.steps, series.values, color=shade, alpha=0.35, linewidth=0.7)
                series = smoothed(series)
            marker = "." if len(series.steps) <= FEW else ""
            look: dict[str, Any] = {"linestyle": dashes, "marker": marker, "linewidth": 1.3}
            axes.plot(series.steps, series.values, color=shade, **look)
            shade = shade if alone else GRAY
            labels.setdefault(label(short_name), Line2D([], [], color=shade, linestyle=dashes))
    if len(labels) > 1:
        legend_below(axes, labels)


def legend_below(axes: Axes, labels: dict[str, Any]) -> None:
    """Say below a panel what its lines are: within it they would be covered."""
    where: dict[str, Any] = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.18)}
    axes.legend(labels.values(), labels, **where, ncols=5, fontsize=7)


def draw_curves(found: Comparison, axes: Axes) -> None:
    """Draw the validation curves of each contender's best settings: mean and range over seeds."""
    losses = []
    for contender in found.contenders:
        curves = [each.curve for each in found.trials_of(contender) if each.state == "done"]
        if not curves:
            continue
        own = np.array([curve.losses for curve in curves], dtype=np.float64)
        tokens, shade = curves[0].tokens, color(found.place_of(contender))
        axes.plot(tokens, own.mean(0), color=shade)
        axes.fill_between(tokens, own.min(0), own.max(0), color=shade, alpha=0.2, linewidth=0)
        losses += [*own]
    cut_start(losses, axes)
    axes.set_title("Validation loss of the best settings")
    axes.xaxis.set_major_formatter(EngFormatter(sep=" "))
    axes.set_xlabel("tokens")


def draw_rates(found: Comparison, axes: Axes) -> None:
    """Draw the final loss of the first seed by learning rate, the best of other settings each.

    A cross at the top is a learning rate with which all trials failed or diverged.
    """
    axes.set_title("Final loss by learning rate")
    trials = [each for each in found.trials if each.seed == found.seeds[0]]
    for contender in found.contenders:
        losses: dict[Any, list[float]] = {}
        for trial in trials:
            if trial.contender == contender.name and trial.state != "pending":
                losses.setdefault(trial.settings["lr"], []).append(
                    math.inf if trial.loss is None else trial.loss
                )
        best = {rate: min(losses[rate]) for rate in sorted(losses)}
        done = {rate: loss for rate, loss in best.items() if math.isfinite(loss)}
        lost = [rate for rate in best if rate not in done]
        shade, where = color(found.place_of(contender)), axes.get_xaxis_transform()
        axes.plot([*done], [*done.values()], marker="o", color=shade)
        if lost:  # a line without points would count as one in the figure's corner
            axes.plot(lost, [1.0] * len(lost), "x", color=shade, transform=where, clip_on=False)
    rates: list[Any] = sorted({each.settings["lr"] for each in trials})
    shown = rates[:: -(-len(rates) // MOST_RATES)]
    axes.set_xscale("log")
    axes.set_xticks(shown, [f"{rate:.3g}" for rate in shown])
    axes.minorticks_off()
    axes.set_xlabel("learning rate")


def cut_start(curves: list[NDArray[np.float64]], axes: Axes) -> None:
    """Cut off what is higher only at the start of the curves."""
    later = [values[int(START * len(values)) :] for values in curves]
    highest = max((np.nanmax(each) for each in later if np.isfinite(each).any()), default=None)
    if highest is not None:
        low, _ = axes.get_ylim()
        axes.set_ylim(top=highest + 0.03 * max(highest - low, 0.0))


def smoothed(series: Series) -> Series:
    """Return means over a window of rows that moves along, NaN where it has no finite value."""
    rows = len(series.steps)
    half = max(int(SHARE * rows) // 2, 1)
    finite = np.isfinite(series.values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(finite, series.values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(finite)])
    # At both ends the window is shorter, and stays around its row.
    row = np.arange(rows)
    reach = np.minimum(half, np.minimum(row, rows - 1 - row))
    inside = counts[row + reach + 1] - counts[row - reach]
    means = (sums[row + reach + 1] - sums[row - reach]) / np.maximum(inside, 1)
    return Series(series.steps, np.where(inside > 0, means, np.nan))


def restarts(run: Run) -> list[int]:
    """Return the steps after which a run was started again."""
    return [event.step for event in run.events if event.kind == "started"][1:]


def title_of(names: Sequence[str]) -> str:
    """Return the title of runs that are called so."""
    title = ", ".join(names)
    return title if len(title) <= LONGEST else f"{len(names)} runs"


def run_names(runs: Sequence[Run]) -> list[str]:
    """Return what runs are called: by the ends of their paths, as short as they differ."""
    paths = [run.folder.absolute().parts for run in runs]
    for length in range(1, max(map(len, paths))):
        names = [label("/".join(path[-length:])) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [f"{number + 1}: {label(path[-1])}" for number, path in enumerate(paths)]


def label(text: str) -> str:
    """Return a text in a line that is not too long, without what steers a terminal."""
    text = " ".join(harmless(text).split())
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


def color(number: int) -> str:
    """Return the color of a run or, in a chart of one run, of a measurement."""
    return f"C{number % 10}"
