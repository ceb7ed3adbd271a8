"""The page of a comparison: its table, what differs by more than the spread, losses, trials."""

import os
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import quote

from torchmars.comparison.results import (
    Comparison,
    ContenderResult,
    Difference,
    Estimate,
    TrialResult,
)
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
        "about": "How to read this page",
    }
    return page(
        "comparison_page.html",
        {
            "runs": [drawn(found, contender) for contender in found.contenders],
            "charts": charts,
            "others": every,
            "baseline": found.baseline,
            "steps": found.steps,
            "smooth": 0,
        },
        renewed_every,
        title=found.name,
        subtitle=f"A comparison of optimizers. {folder.absolute()}.",
        sections={id: name for id, name in sections.items() if name},
        has_steps=False,
        folder=str(folder),
        config=" ".join(found.config),
        notes=found.notes,
        facts=facts(found),
        baseline=found.baseline,
        contenders=[
            {"place": found.place_of(each), **contender_row(each)} for each in found.contenders
        ],
        differences=[difference_row(each) for each in found.differences],
        trials=[trial_row(each, folder, file) for each in found.trials],
    )


def facts(found: Comparison) -> dict[str, str]:
    """Return what was compared, by name."""
    states = Counter(trial.state for trial in found.trials)
    return {
        "tokens of each trial": short(found.tokens),
        "steps": f"{found.steps:,}",
        "seeds": ", ".join(map(str, found.seeds)),
        **{name: ", ".join(map(value_text, values)) for name, values in found.grid.items()},
        "trials": ", ".join(f"{count} {state}" for state, count in states.items()),
    }


def drawn(found: Comparison, contender: ContenderResult) -> dict[str, Any]:
    """Return what the scripts draw of a contender."""
    own = [trial for trial in found.trials if trial.contender == contender.name]
    best = {trial.name for trial in found.trials_of(contender)}
    return {
        "name": contender.name,
        "place": found.place_of(contender),
        "finals": contender.losses,
        "mean": contender.mean,
        "saved": {
            "tokens": estimate_json(contender.tokens_saved),
            "time": estimate_json(contender.seconds_saved),
        },
        "grid": [
            {"lr": trial.settings["lr"], "loss": trial.loss, "text": trial_text(trial)}
            for trial in own
            if "lr" in trial.settings and trial.seed == found.seeds[0] and trial.state != "pending"
        ],
        "trials": [
            {
                "name": trial.name,
                "best": trial.name in best,
                "tokens": trial.curve.tokens,
                "seconds": trial.curve.seconds,
                "losses": trial.curve.losses,
            }
            for trial in own
        ],
    }


def estimate_json(estimate: Estimate | None) -> dict[str, float | None] | None:
    """Return an estimate as the scripts read it."""
    return (
        None
        if estimate is None
        else {"mean": estimate.mean, "low": estimate.low, "high": estimate.high}
    )


def trial_text(trial: TrialResult) -> str:
    """Return a trial's settings and how it ended."""
    ended = trial.state if trial.loss is None else f"loss {trial.loss:.4f}"
    return f"{trial.contender}, {settings_text(trial.settings)}: {ended}"


def contender_row(contender: ContenderResult) -> dict[str, str]:
    """Return a contender's row of the table."""
    at_edge = [f"{name} is the {end} that was tried" for name, end in contender.edges.items()]
    rule = [] if contender.rule == contender.name else [f"optimizer.name is {contender.rule}"]
    return {
        "name": contender.name,
        "settings": DASH if contender.best is None else settings_text(contender.best),
        "mean": DASH if contender.mean is None else f"{contender.mean:.4f}",
        "spread": DASH if contender.spread is None else f"{contender.spread:.4f}",
        "seeds": str(len(contender.losses)),
        "tokens": saved_text(contender.tokens_saved),
        "time": saved_text(contender.seconds_saved),
        "remark": "; ".join([*at_edge, *([contender.remark] if contender.remark else []), *rule]),
    }


def saved_text(saved: Estimate | None) -> str:
    """Return a share that is saved with its interval, in percent."""
    if saved is None:
        return DASH
    interval = "" if saved.low is None else f" ({saved.low:.0%} to {saved.high:.0%})"
    return f"{saved.mean:.0%}{interval}".replace("-", "−")


def difference_row(each: Difference) -> dict[str, str]:
    """Return a row of the table of differences."""
    low, high = each.loss.low, each.loss.high
    known = low is not None and high is not None
    reading = {
        None: ("unknown", "one seed: the spread is not known"),
        False: ("inside", "does not exceed the spread over seeds"),
        True: ("exceeds", f"{each.first if each.loss.mean < 0 else each.second} is better"),
    }
    kind, words = reading[each.exceeds_spread]
    return {
        "first": each.first,
        "second": each.second,
        "mean": signed(each.loss.mean),
        "interval": f"{signed(low or 0.0)} to {signed(high or 0.0)}" if known else DASH,
        "kind": kind,
        "reading": words,
    }


def signed(value: float) -> str:
    """Return a difference of losses with its sign."""
    return f"{value:+.4f}".replace("-", "−")


def trial_row(trial: TrialResult, folder: Path, file: Path) -> dict[str, str]:
    """Return a trial's row of the table."""
    return {
        "name": trial.name,
        "link": link(folder / trial.folder, file),
        "contender": trial.contender,
        "settings": settings_text(trial.settings),
        "seed": str(trial.seed),
        "state": trial.state,
        "loss": DASH if trial.loss is None else f"{trial.loss:.4f}",
        "time": DASH if trial.seconds is None else duration(trial.seconds),
        "reason": trial.reason,
    }


def link(run: Path, file: Path) -> str:
    """Return the address of a run's report or folder, as seen from the page `file`."""
    target = run / "report.html" if (run / "report.html").is_file() else run
    return quote(os.path.relpath(target, file.absolute().parent))


def settings_text(settings: dict[str, float | list[float]]) -> str:
    """Return settings in words."""
    return ", ".join(f"{name} {value_text(value)}" for name, value in settings.items())


def value_text(value: float | list[float]) -> str:
    """Return the value of a setting."""
    if isinstance(value, list):
        return "(" + ", ".join(map(value_text, value)) + ")"
    return f"{value:g}"
