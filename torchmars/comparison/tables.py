"""What a comparison has found as tables: Markdown, CSV, and plain text.

Seconds are in columns and tables of their own. See results.py.
"""

import csv
import io
from collections.abc import Sequence

from torchmars.comparison.results import (
    Comparison,
    ContenderResult,
    Difference,
    Estimate,
    Settings,
    TrialResult,
)
from torchmars.core.tables import table
from torchmars.core.words import counted

Rows = list[list[str]]


def contender_rows(found: Comparison) -> Rows:
    """Return a row for each contender, the best first, after the headings."""
    rows = [["optimizer", "best settings", "final loss", "spread", "seeds", "tokens saved"]]
    for each in found.contenders:
        rows.append(
            [
                each.name,
                settings_text(each),
                number(each.mean),
                number(each.spread),
                str(len(each.losses)),
                share(each.tokens_saved) or each.remark,
            ]
        )
    return rows


def time_rows(found: Comparison) -> Rows:
    """Return what each contender took, and how much less time it needs than the baseline."""
    rows = [["optimizer", "seconds of a trial", "time saved"]]
    for each in found.contenders:
        seconds = [trial.seconds for trial in found.trials_of(each) if trial.seconds is not None]
        mean = f"{sum(seconds) / len(seconds):,.1f}" if seconds else "-"
        rows.append([each.name, mean, share(each.seconds_saved) or "-"])
    return rows


def difference_rows(found: Comparison) -> Rows:
    """Return a row for each pair of contenders."""
    rows = [["optimizers", "difference of losses", "95% interval", "exceeds the spread"]]
    for each in found.differences:
        low, high = each.loss.low, each.loss.high
        interval = "-" if low is None or high is None else f"{low:+.4f} to {high:+.4f}"
        rows.append(
            [f"{each.first} - {each.second}", f"{each.loss.mean:+.4f}", interval, said(each)]
        )
    return rows


def trial_rows(found: Comparison) -> Rows:
    """Return a row for each trial, without its seconds."""
    names = list(found.grid)
    rows = [["optimizer", *names, "seed", "state", "final loss", "reason"]]
    for each in found.trials:
        values = [value_text(each.settings, name) for name in names]
        loss = number(each.loss)
        rows.append([each.contender, *values, str(each.seed), each.state, loss, each.reason])
    return rows


def csv_text(found: Comparison) -> str:
    """Return a row for each trial as CSV; the losses with all digits, the last column seconds."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    names = list(found.grid)
    heads = ["optimizer", *names, "seed", "state", "tokens", "final_loss", "reason", "folder"]
    writer.writerow([*heads, "seconds"])
    for each in found.trials:
        writer.writerow([*csv_cells(each, names, found.tokens), each.seconds])
    return out.getvalue()


def csv_cells(trial: TrialResult, names: Sequence[str], tokens: int) -> list[object]:
    """Return the cells of a trial's row of CSV, but for its seconds."""
    values = [value_text(trial.settings, name) for name in names]
    known = [trial.seed, trial.state, tokens, trial.loss, trial.reason, trial.folder]
    return [trial.contender, *values, *known]


def markdown(found: Comparison) -> str:
    """Return all tables as Markdown."""
    parts = [
        f"# {found.name}",
        introduction(found),
        *([" ".join(found.notes)] if found.notes else []),
        "## Optimizers",
        markdown_table(contender_rows(found)),
        "## Differences",
        markdown_table(difference_rows(found)),
        "## Time",
        markdown_table(time_rows(found)),
        "## Trials",
        markdown_table(trial_rows(found)),
    ]
    return "\n\n".join(parts) + "\n"


def introduction(found: Comparison) -> str:
    """Return what was compared, in words."""
    grid = "; ".join(
        f"{name} {', '.join(value_of(value) for value in values)}"
        for name, values in found.grid.items()
    )
    seeds = f"seed {found.seeds[0]}"
    if len(found.seeds) > 1:
        seeds += f", the best settings repeated up to seed {found.seeds[-1]}"
    return (
        f"`{' '.join(found.config)}`: each trial has {counted(found.steps, 'step')} and "
        f"{found.tokens:,} tokens. Tuned over {grid} with {seeds}. Losses are validation losses "
        "after the last step."
    )


def lines(found: Comparison) -> list[str]:
    """Return the tables of contenders, differences and time for a console, and the notes."""
    parts = [contender_rows(found), difference_rows(found), time_rows(found)]
    shown = [line for rows in parts if len(rows) > 1 for line in ["", *table(rows)]]
    return [*shown, "", *found.notes]


def markdown_table(rows: Rows) -> str:
    """Return rows of cells, the first of them headings, as a table of Markdown."""
    cells = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return "\n".join(
        f"| {' | '.join(row)} |" for row in [cells[0], ["---"] * len(cells[0]), *cells[1:]]
    )


def settings_text(contender: ContenderResult) -> str:
    """Return the best settings in words, and which of them lie at the edge of what was tried."""
    if contender.best is None:
        return "-"
    return ", ".join(
        f"{name} {value_of(value)}"
        + (f" (the {contender.edges[name]} tried)" if name in contender.edges else "")
        for name, value in contender.best.items()
    )


def value_text(settings: Settings, name: str) -> str:
    """Return the value of a setting; nothing where a trial has none of it."""
    return value_of(settings[name]) if name in settings else ""


def value_of(value: float | list[float]) -> str:
    """Return a value in words."""
    return " ".join(f"{each:g}" for each in (value if isinstance(value, list) else [value]))


def number(value: float | None) -> str:
    """Return a loss as a table shows it."""
    return "-" if value is None else f"{value:.4f}"


def share(value: Estimate | None) -> str:
    """Return a share saved with its interval; nothing where it is not known."""
    if value is None:
        return ""
    interval = "" if value.low is None else f" ({value.low:.1%} to {value.high:.1%})"
    return f"{value.mean:.1%}{interval}"


def said(difference: Difference) -> str:
    """Return whether a difference exceeds the spread over seeds."""
    return {True: "yes", False: "no", None: "not known"}[difference.exceeds_spread]
