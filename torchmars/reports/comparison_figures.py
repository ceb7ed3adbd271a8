"""The figures of a comparison on a page. A trace's run is its contender's place."""

from typing import Any

from torchmars.comparison.planes import Plane, planes_of, shading, text_at
from torchmars.comparison.results import Axis, Comparison, TrialResult
from torchmars.comparison.words import settings_text
from torchmars.reports.page import PageFigure
from torchmars.reports.run_figures import Trace, in_unit, rows_axis

LOSS = {"title": "validation loss", "log": True}


def figures_of(found: Comparison) -> list[PageFigure]:
    """Return the figures of a comparison."""
    planes, axes = planes_of(found), (by_axis(found, "tokens"), by_axis(found, "seconds"))
    saved = any(each.tokens_saved or each.seconds_saved for each in found.contenders)
    with_planes = [by_betas_gamma(found, planes)] if planes else []
    return [by_lr(found), *with_planes, *axes, by_seed(found), *([what_is_saved(found)] * saved)]


def looks(found: Comparison) -> dict[str, Trace]:
    """Return the traces of contenders without their points, by name."""
    places = {each.name: found.place_of(each) for each in found.contenders}
    return {
        name: {"run": place, "color": place, "group": place, "name": name}
        for name, place in places.items()
    }


def by_lr(found: Comparison) -> PageFigure:
    """Return the final loss at each learning rate: a line through the best of other settings."""
    traces = []
    for name, look in looks(found).items():
        own = [e for e in found.trials if (e.contender, e.seed) == (name, found.seeds[0])]
        done = [each for each in own if each.loss is not None]
        done.sort(key=lambda each: each.loss or 0.0, reverse=True)
        best = {each.settings["lr"]: each for each in done}
        rest = [each for each in done if each is not best[each.settings["lr"]]]
        lost = [each for each in own if each.state not in ("done", "pending")]
        line = [best[lr] for lr in sorted(best)]
        for style, trials in (("line", line), ("dots", rest), ("lost", lost)):
            lrs = [each.settings["lr"] for each in trials]
            top = 0.97 - 0.05 * (look["color"] % 6)
            heights = [top if style == "lost" else each.loss for each in trials]
            text = [*map(trial_text, trials)]
            traces.append(look | {"style": style, "x": lrs, "y": heights, "text": text})
    note = "the first seed; the line joins the best of the other settings; "
    note += "a cross at the top: failed or diverged"
    x = {"type": "log", "title": "learning rate", "dtick": "D2", "tickformat": "~g"}
    return PageFigure("Final loss against learning rate", traces, note, x, LOSS, large=True)


def trial_text(trial: TrialResult) -> str:
    """Return a trial's settings and how it ended."""
    ended = trial.state if trial.loss is None else f"loss {trial.loss:.4f}"
    return f"{trial.contender}, {settings_text(trial.settings)}: {ended}"


def by_betas_gamma(found: Comparison, planes: list[Plane]) -> PageFigure:
    """Return the final loss by betas, in rows, and gamma, in columns: a block for each contender.

    Those of a rule without gamma are as wide as all columns.
    """
    shade, gammas = shading(planes), max((plane.gammas for plane in planes), key=len)
    traces, ticks, top = [], {}, 0.0
    for plane in planes:
        width = len(gammas) / len(plane.gammas)
        rows = [[plane.points[betas, gamma] for gamma in plane.gammas] for betas in plane.betas]
        look = looks(found)[plane.contender.name] | {"style": "plane", "group": None}
        look |= {"x0": (width - 1) / 2, "dx": width, "y0": top, "dy": 1}
        look["z"] = [[1 - shade(each) for each in row] for row in rows]
        look["text"] = [[*map(text_at, row)] for row in rows]
        look["best"] = [[each.settings == plane.contender.best for each in row] for row in rows]
        traces.append(look | {"hovertext": [[*map(trial_text, row)] for row in rows]})
        for row, betas in enumerate(plane.betas):
            ticks[top + row] = f"{plane.contender.name} {betas}"
        top += len(plane.betas) + 0.4
    x: Trace = {"title": "gamma" if any(gammas) else "", "tickvals": [*range(len(gammas))]}
    y: Trace = {"autorange": "reversed", "tickvals": [*ticks], "ticktext": [*ticks.values()]}
    y["showgrid"] = False
    note = "the first seed; the best of the other settings; stronger is lower, bold the best of "
    note += "each; a rule without gamma has one value for all; a cross: failed or diverged"
    x |= {"ticktext": gammas, "showgrid": False}
    return PageFigure("Final loss by betas and gamma", traces, note, x, y, large=True)


def by_axis(found: Comparison, axis: Axis, every: bool = False) -> PageFigure:
    """Return validation losses against tokens or time: of the best settings, or of every trial."""
    ends = [max(each.curve.along(axis), default=0.0) for each in found.trials]
    unit, size = in_unit(max(ends, default=0.0)) if axis == "seconds" else ("", 1)
    traces = []
    for contender, look in zip(found.contenders, looks(found).values()):
        best = found.trials_of(contender)
        own = [each for each in found.trials if each.contender == contender.name]
        for trial in own if every else best:
            where = [each / size for each in trial.curve.along(axis)]
            style = "line" if trial in best else "faint"
            traces.append(look | {"style": style, "x": where, "y": trial.curve.losses})
            traces[-1]["hover"] = trial.name
    name = "training time" if unit else "tokens"
    note = "the best settings of each, a line for each seed"
    note = "every trial; the best settings are stronger" if every else note
    x = {"title": f"{name}, {unit}" if unit else name, "log": True}
    return PageFigure(f"Validation loss against {name}", traces, note, x, LOSS)


def by_seed(found: Comparison) -> PageFigure:
    """Return final losses of the best settings: a dot for each seed, a bar for their mean."""
    traces = []
    for row, (contender, look) in enumerate(zip(found.contenders, looks(found).values())):
        dots = {"style": "dots", "x": contender.losses, "y": [row] * len(contender.losses)}
        mean = {"style": "mean", "x": [contender.mean], "y": [row]}
        traces += [look | dots | {"group": None}, look | mean | {"group": None}]
    x = {"title": "validation loss after the last step"}
    y = rows_axis([each.name for each in found.contenders])
    note = "a dot for each seed, a line for their mean"
    return PageFigure("Final loss by seed", traces, note, x, y)


def what_is_saved(found: Comparison) -> PageFigure:
    """Return tokens and time that each does not need for the baseline's loss, with intervals."""
    traces: list[dict[str, Any]] = []
    for row, (contender, look) in enumerate(zip(found.contenders, looks(found).values())):
        saved = {"tokens": contender.tokens_saved, "time": contender.seconds_saved}
        for at, (name, share) in enumerate(saved.items()):
            if share is not None:
                ends = [100 * (share.mean if e is None else e) for e in (share.low, share.high)]
                more = {"style": name, "group": name, "name": name, "ends": ends}
                more |= {"x": [100 * share.mean], "y": [row - 0.12 + 0.24 * at]}
                traces.append(look | more)
    x = {"title": f"% less than {found.baseline}", "zeroline": True}
    note, y = "mean and 95% interval; right of 0 is better", rows_axis([*looks(found)])
    return PageFigure(f"What {found.baseline}'s loss takes", traces, note, x, y)
