"""Settings, losses, savings and seeds of a comparison in words."""

from collections.abc import Collection

from torchmars.comparison.results import (
    ContenderResult,
    Estimate,
    Settings,
    Value,
    numbers_of,
)
from torchmars.core.words import counted


def best_settings(contender: ContenderResult, names: Collection[str]) -> str:
    """Return the best settings, those in `names`, and which lie at the edge of what was tried."""
    if contender.best is None:
        return "-"
    parts = []
    for name, value in contender.best.items():
        if name in names:
            edges = edges_text(contender, name, value)
            parts.append(f"{name} {value_text(value)}{f' ({edges})' if edges else ''}")
    return ", ".join(parts)


def edges_text(contender: ContenderResult, name: str, value: Value) -> str:
    """Return which numbers of a best value lie at the edge of what was tried; empty for none."""
    if name in contender.edges:
        return f"the {contender.edges[name]} tried"
    return ", ".join(
        f"{number:g} the {end} tried"
        for place, number in enumerate(numbers_of(value))
        if (end := contender.edges.get(f"{name}[{place}]"))
    )


def settings_text(settings: Settings, names: Collection[str]) -> str:
    """Return those of the settings that are in `names`."""
    return ", ".join(
        f"{name} {value_text(value)}" for name, value in settings.items() if name in names
    )


def value_text(value: Value) -> str:
    """Return the value of a setting: of betas both, with a space between them."""
    return " ".join(f"{each:g}" for each in numbers_of(value))


def number(value: float | None) -> str:
    """Return a loss as a table shows it."""
    return "-" if value is None else f"{value:.4f}"


def share(value: Estimate | None) -> str:
    """Return a share saved with its interval; nothing where it is not known."""
    if value is None:
        return ""
    interval = "" if value.low is None else f" ({value.low:.1%} to {value.high:.1%})"
    return f"{value.mean:.1%}{interval}"


def seeds_text(seeds: list[int]) -> str:
    """Return how many seeds there are, and which: a seed 0 alone would read as none."""
    first, last = seeds[0], seeds[-1]
    which = f"number {first}" if len(seeds) == 1 else f"numbers {first} to {last}"
    return f"{counted(len(seeds), 'seed')} ({which})"
