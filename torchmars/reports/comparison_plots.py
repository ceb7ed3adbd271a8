"""The plots of a comparison, by matplotlib: PNG and SVG."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from torchmars.comparison.results import Axis, Comparison

SIZE = (7.0, 4.5)  # inches
# Curves fall far in their first part. Losses above that at this share of the tokens are cut off.
SHOWN_FROM = 0.15


def plot_comparison(found: Comparison, folder: Path) -> list[Path]:
    """Write the plots of a comparison to `folder`; return their files."""
    import matplotlib
    from matplotlib.figure import Figure

    plots: dict[str, Callable[[Any], None]] = {
        "loss_by_tokens": lambda axes: draw_curves(axes, found, "tokens"),
        "loss_by_seconds": lambda axes: draw_curves(axes, found, "seconds"),
        "loss_by_lr": lambda axes: draw_tuning(axes, found),
    }
    written = []
    # Without it the SVG's names of parts are drawn by chance.
    with matplotlib.rc_context({"svg.hashsalt": found.name}):
        for name, draw in plots.items():
            figure = Figure(figsize=SIZE, layout="constrained")
            axes = figure.subplots()
            draw(axes)
            axes.set_ylabel("validation loss")
            axes.grid(alpha=0.3)
            if axes.get_legend_handles_labels()[0]:
                axes.legend(frameon=False)
            for suffix, about in (("png", {"Software": None}), ("svg", {"Date": None})):
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
    axes.set_xlabel("learning rate")
