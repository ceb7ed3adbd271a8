"""The plots of a comparison, by matplotlib: PNG and SVG."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import EngFormatter

from torchmars.comparison.planes import Plane, planes_of, shading, text_at
from torchmars.comparison.results import Axis, Comparison
from torchmars.reports.plots import STYLE

SIZE = (7.0, 4.5)  # inches
# With what is left out of them, so that they are the same whenever they are drawn.
SUFFIXES: dict[str, dict[str, None]] = {"png": {"Software": None}, "svg": {"Date": None}}
# Curves fall far in their first part. Losses above that at this share of the tokens are cut off.
SHOWN_FROM = 0.15
MOST_RATES = 8  # that are written below the learning rate's axis
# Of the picture of planes, in inches: a cell, and what is beside all cells; in cells: between two
# planes, where the name of the lower one stands. How strong the color of the lowest loss is.
CELL, MARGINS, GAP, STRONGEST = (0.85, 0.3), (1.6, 0.9), 1.2, 0.75


def plot_comparison(found: Comparison, folder: Path) -> list[Path]:
    """Write the plots of a comparison to `folder`; return their files."""
    planes = planes_of(found)
    plots: dict[str, Callable[[Any], None] | None] = {
        "loss_by_tokens": lambda axes: draw_curves(axes, found, "tokens"),
        "loss_by_seconds": lambda axes: draw_curves(axes, found, "seconds"),
        "loss_by_lr": lambda axes: draw_tuning(axes, found),
        "loss_by_betas_gamma": (lambda axes: draw_planes(axes, found, planes)) if planes else None,
    }
    written = []
    # Without it the SVG's names of parts are drawn by chance.
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": found.name}):
        for name, draw in plots.items():
            if draw is None:  # an earlier call of the command may have drawn it
                for suffix in SUFFIXES:
                    (folder / f"{name}.{suffix}").unlink(missing_ok=True)
                continue
            figure = Figure(figsize=SIZE, layout="constrained")
            axes = figure.subplots()
            axes.set_ylabel("validation loss")
            axes.grid(alpha=0.3)
            draw(axes)
            if axes.get_legend_handles_labels()[0]:
                axes.legend(frameon=False)
            for suffix, about in SUFFIXES.items():
                written.append(folder / f"{name}.{suffix}")
                figure.savefig(written[-1], dpi=150, metadata=about)
    return written


def draw_curves(axes: Any, found: Comparison, along: Axis) -> None:
    """Draw the validation curves of each contender's best settings: mean and range over seeds."""
    tops = []
    for contender in found.contenders:
        curves = [each.curve for each in found.trials_of(contender) if each.state == "done"]
        if not curves:
            continue
        losses = np.array([curve.losses for curve in curves], dtype=np.float64)
        places = np.mean([curve.along(along) for curve in curves], axis=0)
        color = f"C{found.place_of(contender) % 10}"
        axes.plot(places, losses.mean(0), color=color, label=contender.name)
        axes.fill_between(places, losses.min(0), losses.max(0), color=color, alpha=0.2, linewidth=0)
        tops.append(np.nanmax(losses[:, int(SHOWN_FROM * losses.shape[1])]))
    if tops:
        axes.set_ylim(top=max(tops))
    axes.xaxis.set_major_formatter(EngFormatter(sep=" "))
    axes.set_xlabel(along)


def draw_tuning(axes: Any, found: Comparison) -> None:
    """Draw the final loss of the first seed by learning rate, the best of other settings each.

    A cross at the top is a learning rate with which no trial is done.
    """
    trials = [each for each in found.trials if each.seed == found.seeds[0]]
    trials.sort(key=lambda trial: trial.settings["lr"])
    for contender in found.contenders:
        losses: dict[Any, list[float]] = {}
        for each in trials:
            if each.contender == contender.name:
                of_lr = losses.setdefault(each.settings["lr"], [])
                of_lr += [] if each.loss is None else [each.loss]
        color = f"C{found.place_of(contender) % 10}"
        best = [min(of_lr, default=math.nan) for of_lr in losses.values()]
        axes.plot(list(losses), best, marker="o", color=color, label=contender.name)
        missing = [lr for lr, of_lr in losses.items() if not of_lr]
        where = axes.get_xaxis_transform()
        axes.plot(missing, [1.0] * len(missing), "x", color=color, transform=where, clip_on=False)
    axes.set_xscale("log")
    rates = sorted({each.settings["lr"] for each in trials})
    shown = rates[:: -(-len(rates) // MOST_RATES) or 1]
    axes.set_xticks(shown, [f"{rate:.3g}" for rate in shown])
    axes.minorticks_off()
    axes.set_xlabel("learning rate")


def draw_planes(axes: Any, found: Comparison, planes: list[Plane]) -> None:
    """Draw the final loss of the first seed by betas and gamma: a number and a shade for each.

    Each contender has rows of its own. Those of a rule without gamma are as wide as all columns.
    """
    gammas = max((plane.gammas for plane in planes), key=len)
    shade, ticks, top = shading(planes), {}, 0.0
    for plane in planes:
        color = f"C{found.place_of(plane.contender) % 10}"
        axes.text(0, top - 0.15, plane.contender.name, color=color, weight="bold")
        width = len(gammas) / len(plane.gammas)
        for (betas, gamma), trial in plane.points.items():
            x, y = width * plane.gammas.index(gamma), top + plane.betas.index(betas)
            strength = STRONGEST * (1 - shade(trial))
            axes.add_patch(Rectangle((x, y), width, 1, fc=(color, strength), ec="0.85"))
            weight = "bold" if trial.settings == plane.contender.best else "normal"
            axes.text(
                x + width / 2, y + 0.5, text_at(trial), ha="center", va="center", weight=weight
            )
            ticks[y + 0.5] = betas
        top += len(plane.betas) + GAP
    axes.figure.set_size_inches(
        MARGINS[0] + CELL[0] * len(gammas), MARGINS[1] + CELL[1] * (top + GAP)
    )
    axes.grid(False)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_xlim(0, len(gammas))
    axes.set_ylim(top - GAP, -0.7 * GAP)
    axes.set_yticks(list(ticks), list(ticks.values()))
    axes.set_ylabel("betas" if any(ticks.values()) else "")
    axes.set_xticks([place + 0.5 for place in range(len(gammas))], gammas)
    axes.set_xlabel("gamma" if any(gammas) else "")
