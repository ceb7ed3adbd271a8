"""The figures of runs on a page: curves over steps, and progress through the days."""

import re
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from torchmars.metrics.events import Event
from torchmars.records.run import Run, Series
from torchmars.reports.charts import LOSS, Chart, short_names
from torchmars.reports.curves import NOISY, buckets_for, parts_of_a_whole, smoothed, thinned
from torchmars.reports.events import from_step
from torchmars.reports.page import PageFigure

UNITS = {"days": 86400, "hours": 3600, "minutes": 60}
KNOTS = 200  # steps of which a page knows tokens and time: between two they are nearly linear
Trace = dict[str, Any]
# An event, with the number of its run and its words.
Told = tuple[int, Event, str]


def axes_of(runs: list[Run]) -> dict[str, Any]:
    """Return the titles of the x axes, and where some steps of each run are on them."""
    unit, size = in_unit(max(float(run.seconds(np.array([run.last_step]))[0]) for run in runs))
    known = [np.unique(np.linspace(0, max(run.last_step, 1), KNOTS).astype(int)) for run in runs]
    axes = [
        {"step": steps, "tokens": run.tokens(steps), "seconds": run.seconds(steps) / size}
        for run, steps in zip(runs, known)
    ]
    titles = {"step": "step", "tokens": "tokens", "seconds": f"training time, {unit}"}
    return {"titles": titles, "runs": [{x: numbers(at) for x, at in e.items()} for e in axes]}


def in_unit(seconds: float) -> tuple[str, int]:
    """Return the unit of an axis that reaches so far, and its seconds."""
    fitting = ((unit, size) for unit, size in UNITS.items() if seconds >= 3 * size)
    return next(fitting, ("seconds", 1))


def figure_of(chart: Chart, runs: list[Run], names: list[str], events: list[Told]) -> PageFigure:
    """Return the figure of a chart."""
    if chart.stacked and len(runs) > 1:
        return bars(chart, runs, names)
    alone, is_loss = len(runs) == 1, chart.pattern == LOSS.pattern
    labels, buckets = short_names(chart.names), buckets_for(len(runs))
    traces, notes = [], [chart.unit] if chart.unit else []
    rows, lost, smooths = 0, 0, False
    for at, name in enumerate(chart.names):
        for number, run in enumerate(runs):
            if name not in run.series:
                continue
            series = run.series[name]
            rows, lost = rows + len(series.steps), lost + int((~np.isfinite(series.values)).sum())
            look: Trace = {"run": number, "color": at if alone else number, "group": at}
            look |= {"dash": 0 if alone else at + number // 10, "name": labels[at]}
            look["hover"] = labels[at] if alone else f"{names[number]} {labels[at]}"
            shown = thinned(series, buckets)
            measured = re.fullmatch(chart.pattern, name)  # not another one drawn beside
            if measured and chart.smooth and len(series.steps) > NOISY and not chart.stacked:
                smooths = True
                traces.append(look | points(shown) | {"style": "pale"})
                shown = smoothed(series, buckets)
            traces.append(look | points(shown) | {"style": "line"})
    if chart.stacked:
        parts = parts_of_a_whole([runs[0].series[name] for name in chart.names])
        traces = [old | points(part) | {"style": "area"} for old, part in zip(traces, parts)]
    if is_loss:
        traces += marks_above(events)
    notes += [f"{rows:,} rows"]
    notes += ["means over 3% of them"] if smooths else []
    notes += [f"{lost:,} values were not finite"] if lost else []
    y: Trace = {"log": chart.log and not chart.stacked}
    y |= {"rangemode": "tozero"} if chart.from_zero or chart.stacked else {}
    return PageFigure(
        chart.title, traces, " · ".join(notes), {"log": True}, y, is_loss, by_steps=True
    )


def bars(chart: Chart, runs: list[Run], names: list[str]) -> PageFigure:
    """Return the parts of a whole as a bar for each run: their medians over its reports."""
    traces = []
    for at, (name, label) in enumerate(zip(chart.names, short_names(chart.names))):
        for number, run in enumerate(runs):
            median = float(np.median(run.finite(name))) if len(run.finite(name)) else 0.0
            look = {"style": "bar", "run": number, "color": at, "group": at, "name": label}
            traces.append(look | {"x": [median], "y": [number]})
    note = "each phase's median over all rows"
    return PageFigure(chart.title, traces, note, {"title": chart.unit}, rows_axis(names))


def marks_above(events: list[Told]) -> list[Trace]:
    """Return events at the top of a figure by steps, and the steps that rollbacks undid."""
    undone = [
        {"style": "undone", "run": run, "x": [event.step, event.step, end, end], "y": [0, 1, 1, 0]}
        for run, event, _ in events
        if (end := from_step(event)) is not None and end > event.step
    ]
    marked = marks(events, lambda event: (event.step, 0.97))
    return undone + [trace | {"yaxis": "y2"} for trace in marked]


def marks(events: list[Told], place: Callable[[Event], tuple[Any, float]]) -> list[Trace]:
    """Return a trace for each kind of event of each run, where `place` says that they are."""
    traces: dict[tuple[str, int], Trace] = {}
    for run, event, words in events:
        look: Trace = {"style": "mark", "run": run, "kind": event.kind, "group": f"of {event.kind}"}
        trace = traces.setdefault((event.kind, run), look | {"name": event.kind})
        told = f"{event.kind} after step {event.step}, {words}"
        for axis, value in zip(("x", "y", "text"), (*place(event), told)):
            trace.setdefault(axis, []).append(value)
    return list(traces.values())


def progress_figure(events: list[Told]) -> PageFigure:
    """Return when which step was reached: what happened between, and how long nothing did."""
    lines: dict[int, Trace] = {}
    for run, event, _ in events:
        line = lines.setdefault(run, {"style": "path", "run": run, "color": run, "x": [], "y": []})
        back = from_step(event)
        before = [None] if event.kind == "started" else [] if back is None else [back]
        steps = [*before, event.step]
        line["x"] += [when(event)] * len(steps)
        line["y"] += steps
    traces = [*lines.values(), *marks(events, lambda event: (when(event), event.step))]
    note = "a gap is the time until the next start"
    return PageFigure("Progress", traces, note, {"type": "date"}, {"title": "step"}, large=True)


def when(event: Event) -> str:
    """Return when an event was, in local time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event.time))


def rows_axis(names: list[str]) -> dict[str, Any]:
    """Return a y axis with a row for each of these."""
    ticks = {"tickvals": [*range(len(names))], "ticktext": names}
    return {"autorange": "reversed"} | ticks


def points(series: Series) -> Trace:
    """Return the points of a series for plotly."""
    return {"x": series.steps.tolist(), "y": numbers(series.values)}


def numbers(values: Any) -> list[float | None]:
    """Return values with the digits that a page needs; None, a gap, for one that is not finite."""
    return [float(f"{each:.6g}") if np.isfinite(each) else None for each in values.tolist()]
