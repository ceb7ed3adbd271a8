"""The results of a comparison as tables: Markdown, CSV, and plain text."""

import csv
import io
import math
from collections import Counter
from collections.abc import Collection

import numpy as np

from torchmars.comparison.results import Comparison, Estimate, Settings, Value, numbers_of, rate_of
from torchmars.core.words import counted, number_or_dash, table

Rows = list[list[str]]
RATES = ["size", "best rate", "over seeds", "lowest loss", "lost at the base's rate"]


def contender_rows(found: Comparison) -> Rows:
    """Return a row for each contender after the headings: of optimizers the best is first.

    Its seeds are those of its best settings that are done: where others failed or diverged, the
    mean is flattered. "at an end": the best values that are the outermost ones tried, which may
    not be tuned.
    """
    if found.kind == "size":
        return rate_rows(found)
    heads = ["optimizer", "best settings", "final loss", "spread", "seeds", "at an end"]
    rows = []
    for each in found.contenders:
        done, ends = len(each.losses), (f"{name} {end}" for name, end in each.edges.items())
        lost = sum(trial.state in ("failed", "diverged") for trial in found.trials_of(each))
        row = [each.name, settings_text(each.best, found.tuned) or "-"]
        row += [number_or_dash(each.mean), number_or_dash(each.spread)]
        row += [f"{done} of {done + lost}" if lost else str(done), ", ".join(ends) or "-"]
        rows.append(row + [share(each.tokens_saved) or each.remark] * bool(found.baseline))
    return [heads + ["tokens saved"] * bool(found.baseline), *rows]


def rate_rows(found: Comparison) -> Rows:
    """Return a row for each size after the headings: its best rate, and what the base's costs.

    "lost at the base's rate": by how much the loss at the base's best rate of the grid is above the
    lowest one.
    """
    of_base = losses_of(found, found.names[0], found.seeds[0])
    base_rate = min(of_base, key=of_base.__getitem__, default=math.nan)
    rows = [RATES]
    for name in found.names:
        losses = losses_of(found, name, found.seeds[0])
        own, *others = (best_rate(losses_of(found, name, seed)) for seed in found.seeds)
        known = [rate for rate in (own, *others) if rate is not None]
        spread = f"{min(known):.3g} to {max(known):.3g}" if len(known) > 1 else "-"
        least = min(losses.values(), default=math.nan)
        lost = losses.get(base_rate, math.nan) - least
        rate = number_or_dash(own, ".3g")
        rows.append([name, rate, spread, number_or_dash(least), number_or_dash(lost)])
    return rows


def losses_of(found: Comparison, name: str, seed: int) -> dict[float, float]:
    """Return the lowest loss of each rate that is done, of a size with a seed, by rate."""
    losses: dict[float, float] = {}
    for each in found.trials:
        if each.contender == name and each.seed == seed and each.loss is not None:
            rate = rate_of(each.settings)
            losses[rate] = min(each.loss, losses.get(rate, math.inf))
    return dict(sorted(losses.items()))


def best_rate(losses: dict[float, float]) -> float | None:
    """Return the rate at which a parabola through the lowest loss and its neighbours is lowest.

    It is over the logarithm of the rate. None where the lowest loss is at an end.
    """
    rates, values = np.array([*losses]), np.array([*losses.values()])
    place = int(values.argmin()) if losses else 0
    if not 0 < place < len(rates) - 1:
        return None
    around = slice(place - 1, place + 2)
    a, b, _ = np.polyfit(np.log(rates[around]), values[around], 2)
    return math.exp(-b / (2 * a))


def difference_rows(found: Comparison) -> Rows:
    """Return a row for each pair of contenders: the difference, and whether seeds show it."""
    rows = [["optimizers", "difference of losses", "95% interval", "finding"]]
    for each in found.differences:
        known = [f"{each.loss.mean:+z.4f}", interval_text(each.loss) or "-"]
        finding = "shown" if each.shown else "not shown"
        rows.append([f"{each.first} - {each.second}", *known, finding])
    return rows


def trial_rows(found: Comparison) -> Rows:
    """Return a row for each trial."""
    names = found.tuned
    rows = [[found.kind, *names, "seed number", "state", "final loss", "reason"]]
    for each in found.trials:
        known = [str(each.seed), each.state, number_or_dash(each.loss), each.reason]
        rows.append([each.contender, *values_of(each.settings, names), *known])
    return rows


def csv_text(found: Comparison) -> str:
    """Return a row for each trial as CSV; the losses with all digits."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    names = list(found.grid)
    heads = [found.kind, *names, "seed", "state", "tokens", "final_loss", "reason", "folder"]
    writer.writerow(heads)
    for each in found.trials:
        known = [each.seed, each.state, found.tokens, each.loss, each.reason, each.folder]
        writer.writerow([each.contender, *values_of(each.settings, names), *known])
    return out.getvalue()


def markdown(found: Comparison) -> str:
    """Return all tables as Markdown."""
    parts = [
        f"# {found.name}",
        comparison_in_words(found),
        f"## {found.kind.capitalize()}s",
        markdown_table(contender_rows(found)),
        *(["## Differences", markdown_table(difference_rows(found))] if found.differences else []),
        "## Trials",
        f"{states_text(found)}.",
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
    """Return the tables of contenders and differences, and how many trials have ended how."""
    parts = [contender_rows(found), difference_rows(found)]
    shown = [line for rows in parts if len(rows) > 1 for line in ["", *table(rows)]]
    return [*shown, "", f"trials: {states_text(found)}"]


def markdown_table(rows: Rows) -> str:
    """Return rows of cells, the first of them headings, as a table of Markdown."""
    cells = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    cells.insert(1, ["---"] * len(cells[0]))
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def values_of(settings: Settings, names: list[str]) -> list[str]:
    """Return the values of settings in words; nothing for those that a trial has not."""
    return [value_text(settings[name]) if name in settings else "" for name in names]


def settings_text(settings: Settings | None, names: Collection[str] | None = None) -> str:
    """Return the settings, or those that are in `names`; nothing if there are none."""
    chosen = (settings or {}).items()
    return ", ".join(
        f"{name} {value_text(value)}" for name, value in chosen if names is None or name in names
    )


def value_text(value: Value) -> str:
    """Return the value of a setting: of betas both, with a space between them."""
    return " ".join(f"{each:g}" for each in numbers_of(value))


def interval_text(difference: Estimate) -> str:
    """Return the interval of a difference with signs; nothing if it is not known."""
    low, high = difference.low, difference.high
    return "" if low is None else f"{low:+z.4f} to {high:+z.4f}"


def share(value: Estimate | None) -> str:
    """Return a share saved, or needed more, with its interval; nothing if it is not known."""
    if value is None:
        return ""
    ends = [value.low, value.mean, value.high]
    more = round(value.mean, 3) < 0
    if more:
        ends = [None if each is None else -each for each in reversed(ends)]
    low, mean, high = ("" if each is None else f"{each:z.1%}" for each in ends)
    return f"{mean}{' more' * more}{low and f' ({low} to {high})'}"


def seeds_text(seeds: list[int]) -> str:
    """Return how many seeds there are, and which: a seed 0 alone would read as none."""
    first, last = seeds[0], seeds[-1]
    which = f"number {first}" if len(seeds) == 1 else f"numbers {first} to {last}"
    return f"{counted(len(seeds), 'seed')} ({which})"


def states_text(found: Comparison) -> str:
    """Return how many trials have ended how: 37 done, 2 diverged."""
    states = Counter(trial.state for trial in found.trials)
    return ", ".join(f"{count} {state}" for state, count in states.items())
