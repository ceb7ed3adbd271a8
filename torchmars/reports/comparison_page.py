"""The page of a comparison: the tables that its folder has, with figures and links."""

import os
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import quote

from torchmars.comparison.conclusion import conclusion
from torchmars.comparison.results import Comparison
from torchmars.comparison.tables import contender_rows, difference_rows, time_rows, trial_rows
from torchmars.comparison.words import seeds_text, value_text
from torchmars.core.words import duration, short
from torchmars.reports.comparison_figures import by_axis, figures_of
from torchmars.reports.page import DASH, Section, page

# How columns look; all others have numbers.
LOOKS = dict.fromkeys(("optimizer", "optimizers", "size", "best settings", "trial"), "")
LOOKS |= {"state": "state", "reason": "text"}
ABOUT = (
    "Each {kind} was tuned on the same grid with the same tokens and the first seed. The best "
    "settings, those with the lowest final validation loss, were then repeated with the other "
    "seeds{beside}. The spread is the standard deviation over seeds. Training time is that of the "
    "steps: without validations and saves.",
    "A trial leads to the folder of its run, or to its report where it has one: torchmars report "
    "makes one of a trial's folder.",
    "Drag over a figure to zoom; double-click to go back. A click in a legend hides a curve, the "
    "box of a contender hides it in all figures. The page loads nothing from a network.",
)
SAVED = (
    "Tokens and time saved are the shares of the baseline's that an optimizer does not need for "
    "the baseline's final loss, with their 95% intervals. 20% more: that it needs so much more."
)


def comparison_page(
    found: Comparison, folder: Path, file: Path, renewed_every: int | None = None
) -> str:
    """Return the page of the comparison in `folder`, with links as they lead from `file`.

    Raises `UserError` without plotly.
    """
    heads, *contenders = contender_rows(found)
    of_sizes = found.kind == "size"
    boxes = [((name, found.names.index(name)), *row) for name, *row in contenders]
    every = [by_axis(found, axis, every=True) for axis in ("tokens", "seconds")]
    trials = f"All trials: {' '.join(found.config)}"
    beside = ", those of a size with the learning rates beside its best one too"
    about = [each.format(kind=found.kind, beside=beside * of_sizes) for each in ABOUT]
    what = "Sizes" if of_sizes else "Optimizers, the best first"
    sections = [
        Section("What was found", [" ".join(conclusion(found)), *found.notes]),
        table_of(what, [heads, *boxes], {found.kind: "run"}),
        Section("How it was found", [trials], facts_of_comparison(found)),
        Section("Figures", figures=figures_of(found)),
        Section("Every trial", figures=every, folded=True),
        *([table_of("Differences", difference_rows(found))] if found.differences else []),
        table_of("Time", time_rows(found)),
        table_of("Trials", linked_trials(found, folder, file)),
        Section("How to read this page", [*about, SAVED] if found.baseline else about),
    ]
    subtitle = f"A comparison of {found.kind}s. {folder.absolute()}."
    return page(found.name, subtitle, sections, renewed_every)


def table_of(title: str, rows: list[Any], looks: dict[str, str] | None = None) -> Section:
    """Return a section with rows, the first of them headings."""
    columns = {head: (LOOKS | (looks or {})).get(head, "number") for head in rows[0]}
    return Section(title, columns=columns, rows=rows[1:])


def facts_of_comparison(found: Comparison) -> dict[str, str]:
    """Return what was compared, by name."""
    states = Counter(trial.state for trial in found.trials)
    return {
        "tokens of each trial": short(found.tokens),
        "steps": f"{found.steps:,}",
        "seeds": seeds_text(found.seeds),
        **{name: ", ".join(map(value_text, values)) for name, values in found.grid.items()},
        "trials": ", ".join(f"{count} {state}" for state, count in states.items()),
    }


def linked_trials(found: Comparison, folder: Path, file: Path) -> list[list[Any]]:
    """Return the rows of trials, with links as they lead from `file`, and their times."""
    heads, *rows = trial_rows(found)
    linked: list[list[Any]] = [["trial", *heads, "training time"]]
    for trial, row in zip(found.trials, rows):
        seconds = DASH if trial.seconds is None else duration(trial.seconds)
        linked.append([(trial.name, link(folder / trial.folder, file)), *row, seconds])
    return linked


def link(run: Path, file: Path) -> str:
    """Return the address of a run's report or folder, as seen from the page `file`."""
    target = run / "report.html" if (run / "report.html").is_file() else run
    return quote(os.path.relpath(target, file.absolute().parent))
