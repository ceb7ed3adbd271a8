"""The results of a comparison as tables: Markdown, CSV, and plain text.

Seconds are in columns and tables of their own. See results.py.
"""

import csv
import io

from torchmars.comparison.conclusion import conclusion
from torchmars.comparison.rates import rate_rows
from torchmars.comparison.results import Comparison, Settings
from torchmars.comparison.words import interval_text, seeds_text, settings_text, share, value_text
from torchmars.core.console import labelled
from torchmars.core.tables import table
from torchmars.core.words import counted, number_or_dash

Rows = list[list[str]]


def contender_rows(found: Comparison) -> Rows:
    """Return a row for each contender after the headings: of optimizers the best is first."""
    if found.kind == "size":
        return rate_rows(found)
    heads = ["optimizer", "best settings", "final loss", "spread", "seeds"]
    rows = [
        [
            each.name,
            settings_text(each.best, found.tuned) or "-",
            number_or_dash(each.mean),
            number_or_dash(each.spread),
            str(len(each.losses)),
            *([share(each.tokens_saved) or each.remark] if found.baseline else []),
        ]
        for each in found.contenders
    ]
    return [[*heads, *(["tokens saved"] if found.baseline else [])], *rows]


def time_rows(found: Comparison) -> Rows:
    """Return the time of each contender, and how much less it needs than the baseline."""
    rows = [[found.kind, "seconds of a trial", *(["time saved"] if found.baseline else [])]]
    for each in found.contenders:
        seconds = [trial.seconds for trial in found.trials_of(each) if trial.seconds is not None]
        mean = f"{sum(seconds) / len(seconds):,.1f}" if seconds else "-"
        saved = [share(each.seconds_saved) or "-"] if found.baseline else []
        rows.append([each.name, mean, *saved])
    return rows


def difference_rows(found: Comparison) -> Rows:
    """Return a row for each pair of contenders."""
    exceeds = {True: "yes", False: "no", None: "not known"}
    rows = [["optimizers", "difference of losses", "95% interval", "exceeds the spread"]]
    for each in found.differences:
        known = [f"{each.loss.mean:+z.4f}", interval_text(each.loss) or "-"]
        rows.append([f"{each.first} - {each.second}", *known, exceeds[each.exceeds_spread]])
    return rows


def trial_rows(found: Comparison) -> Rows:
    """Return a row for each trial, without its seconds."""
    names = found.tuned
    rows = [[found.kind, *names, "seed number", "state", "final loss", "reason"]]
    for each in found.trials:
        known = [str(each.seed), each.state, number_or_dash(each.loss), each.reason]
        rows.append([each.contender, *values_of(each.settings, names), *known])
    return rows


def csv_text(found: Comparison) -> str:
    """Return a row for each trial as CSV; the losses with all digits, the last column seconds."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    names = list(found.grid)
    heads = [found.kind, *names, "seed", "state", "tokens", "final_loss", "reason", "folder"]
    writer.writerow([*heads, "seconds"])
    for each in found.trials:
        known = [each.seed, each.state, found.tokens, each.loss, each.reason, each.folder]
        values = values_of(each.settings, names)
        writer.writerow([each.contender, *values, *known, each.seconds])
    return out.getvalue()


def markdown(found: Comparison) -> str:
    """Return all tables as Markdown."""
    parts = [
        f"# {found.name}",
        "## What was found",
        " ".join(conclusion(found)),
        *(["\n".join(f"- {note}" for note in found.notes)] if found.notes else []),
        comparison_in_words(found),
        f"## {found.kind.capitalize()}s",
        markdown_table(contender_rows(found)),
        *(["## Differences", markdown_table(difference_rows(found))] if found.differences else []),
        "## Time",
        markdown_table(time_rows(found)),
        "## Trials",
        markdown_table(trial_rows(found)),
    ]
    return "\n\n".join(parts) + "\n"


def comparison_in_words(found: Comparison) -> str:
    """Return the comparison, in words."""
    grid = {name: ", ".join(map(value_text, values)) for name, values in found.grid.items()}
    tuned = "; ".join(f"{name} {grid[name]}" for name in found.tuned)
    same = "".join(f"; {name} {grid[name]} for all" for name in grid if name not in found.tuned)
    more = f", the best settings with {seeds_text(found.seeds)}" if len(found.seeds) > 1 else ""
    return (
        f"`{' '.join(found.config)}`: each trial has {counted(found.steps, 'step')} and "
        f"{found.tokens:,} tokens. Tuned over {tuned}{same}, with {seeds_text(found.seeds[:1])}"
        f"{more}. Losses are validation losses after the last step."
    )


def lines(found: Comparison) -> list[str]:
    """Return the conclusion, the tables of contenders, differences and time, and the notes."""
    parts = [contender_rows(found), difference_rows(found), time_rows(found)]
    shown = [line for rows in parts if len(rows) > 1 for line in ["", *table(rows)]]
    return ["", *labelled("found", *conclusion(found)), *shown, "", *found.notes]


def markdown_table(rows: Rows) -> str:
    """Return rows of cells, the first of them headings, as a table of Markdown."""
    cells = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    cells.insert(1, ["---"] * len(cells[0]))
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def values_of(settings: Settings, names: list[str]) -> list[str]:
    """Return the values of settings in words; nothing for those that a trial has not."""
    return [value_text(settings[name]) if name in settings else "" for name in names]
