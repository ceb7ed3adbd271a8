"""Settings, losses, savings and seeds of a comparison in words."""

from collections.abc import Collection

from torchmars.comparison.results import Estimate, Settings, Value, numbers_of
from torchmars.core.words import counted


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
