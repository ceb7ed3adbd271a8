"""The page of a comparison: its table, what differs by more than the spread, losses, trials."""

import os
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import quote

from torchmars.comparison.conclusion import conclusion
from torchmars.comparison.planes import Plane, planes_of, shading, text_at
from torchmars.comparison.results import (
    Comparison,
    ContenderResult,
    Difference,
    Estimate,
    TrialResult,
)
from torchmars.comparison.words import seeds_text, settings_text, value_text
from torchmars.core.words import duration, short
from torchmars.reports.page import DASH, page


def comparison_page(
    found: Comparison, folder: Path, file: Path, renewed_every: int | None = None
) -> str:
    """Return the page of the comparison in `folder`, with links as they lead from `file`.

    Raises `UserError` without plotly.
    """
    validation = {"kind": "validation"}
    charts: list[dict[str, Any]] = [
        {"kind": "grid", "title": "Final loss against learning rate", "large": True},
        validation | {"title": "Validation loss against tokens", "axis": "tokens"},
        validation | {"title": "Validation loss against training time", "axis": "seconds"},
        {"kind": "finals", "title": "Final loss by seed"},
    ]
    planes = {each.contender.name: each for each in planes_of(found)}
    if planes:
        charts.insert(1, {"kind": "plane", "title": "Final loss by betas and gamma", "large": True})
    if any(each.tokens_saved or each.seconds_saved for each in found.contenders):
        charts.append({"kind": "saved", "title": f"What {found.baseline}'s loss takes"})
    every = [
        {"kind": "validation", "title": f"Against {name}", "axis": axis, "all": True}
        for name, axis in (("tokens", "tokens"), ("training time", "seconds"))
    ]
    sections = {
        "found": "What was found",
        "curves": "Charts",
        "differences": "Differences" if found.differences else "",
        "trials": "Trials",
    }
    return page(
        "comparison_page.html",
        {
            "runs": [drawn(found, contender) for contender in found.contenders],
            "planes": {name: drawn_plane(planes, each) for name, each in planes.items()},
            "charts": charts,
            "others": every,
            "baseline": found.baseline,
            "steps": found.steps,
            "smooth": 0,
        },
        renewed_every,
        title=found.name,
        subtitle=f"A comparison of optimizers. {folder.absolute()}.",
        sections=sections,
        has_steps=False,
        folder=str(folder),
        found=found,
        baseline=found.baseline,
        conclusion=conclusion(found),
        facts=facts(found),
        settings=lambda settings: settings_text(settings, found.tuned) or DASH,
        loss=loss_text,
        saved=saved_text,
        remark=remark,
        signed=signed,
        reading=reading,
        link=lambda trial: link(folder / trial.folder, file),
        duration=duration,
    )


def facts(found: Comparison) -> dict[str, str]:
    """Return what was compared, by name."""
    states = Counter(trial.state for trial in found.trials)
    return {
        "tokens of each trial": short(found.tokens),
        "steps": f"{found.steps:,}",
        "seeds": seeds_text(found.seeds),
        **{name: ", ".join(map(value_text, values)) for name, values in found.grid.items()},
        "trials": ", ".join(f"{count} {state}" for state, count in states.items()),
    }


def drawn(found: Comparison, contender: ContenderResult) -> dict[str, Any]:
    """Return what the scripts draw of a contender."""
    own = [trial for trial in found.trials if trial.contender == contender.name]
    best = {trial.name for trial in found.trials_of(contender)}
    saved = {"tokens": contender.tokens_saved, "time": contender.seconds_saved}
    return {
        "name": contender.name,
        "place": found.place_of(contender),
        "finals": contender.losses,
        "mean": contender.mean,
        "saved": {name: each and asdict(each) for name, each in saved.items()},
        "grid": [
            {"lr": trial.settings["lr"], "loss": trial.loss, "text": trial_text(trial)}
            for trial in own
            if "lr" in trial.settings and trial.seed == found.seeds[0] and trial.state != "pending"
        ],
        "trials": [
            {"name": trial.name, "best": trial.name in best} | asdict(trial.curve) for trial in own
        ],
    }


def drawn_plane(planes: dict[str, Plane], plane: Plane) -> dict[str, Any]:
    """Return what the scripts draw of one of the planes."""
    shade = shading(list(planes.values()))

    def point(betas: str, gamma: str) -> dict[str, Any]:
        trial = plane.points[betas, gamma]
        best = trial.settings == plane.contender.best
        return {
            "said": text_at(trial),
            "shade": shade(trial),
            "best": best,
            "text": trial_text(trial),
        }

    return {
        "betas": plane.betas,
        "gammas": plane.gammas,
        "points": [[point(betas, gamma) for gamma in plane.gammas] for betas in plane.betas],
    }


def trial_text(trial: TrialResult) -> str:
    """Return a trial's settings and how it ended."""
    ended = trial.state if trial.loss is None else f"loss {trial.loss:.4f}"
    return f"{trial.contender}, {settings_text(trial.settings)}: {ended}"


def remark(contender: ContenderResult) -> str:
    """Return what a reader must know of a contender."""
    rule = f"optimizer.name is {contender.rule}" if contender.rule != contender.name else ""
    return "; ".join(filter(None, (contender.remark, rule)))


def loss_text(loss: float | None) -> str:
    """Return a loss, or the spread of losses."""
    return DASH if loss is None else f"{loss:.4f}"


def saved_text(saved: Estimate | None) -> str:
    """Return a share that is saved with its interval, in percent."""
    if saved is None:
        return DASH
    interval = "" if saved.low is None else f" ({saved.low:.0%} to {saved.high:.0%})"
    return f"{saved.mean:.0%}{interval}".replace("-", "−")


def reading(each: Difference) -> tuple[str, str]:
    """Return what a difference tells: its kind, and words."""
    if each.exceeds_spread is None:
        return "unknown", "one seed: the spread is not known"
    if not each.exceeds_spread:
        return "inside", "does not exceed the spread over seeds"
    return "exceeds", f"{each.first if each.loss.mean < 0 else each.second} is better"


def signed(value: float) -> str:
    """Return a difference of losses with its sign."""
    return f"{value:+.4f}".replace("-", "−")


def link(run: Path, file: Path) -> str:
    """Return the address of a run's report or folder, as seen from the page `file`."""
    target = run / "report.html" if (run / "report.html").is_file() else run
    return quote(os.path.relpath(target, file.absolute().parent))
