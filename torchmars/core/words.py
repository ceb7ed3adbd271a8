"""Counts, numbers, times and tables in the words of messages."""

import math
import unicodedata
from collections.abc import Callable, Collection, Sequence
from typing import Any

from torchmars.core.console import harmless


def counted(number: int, thing: str, things: str = "") -> str:
    """Return a number and what it counts: 1 `thing`, else `things`, by default with an s."""
    return f"{number:,} {thing if number == 1 else things or f'{thing}s'}"


def divisor_of(number: int) -> str:
    """Return what may be chosen where `number` must be divided."""
    return f"a divisor of {number}" if number > 1 else "1"


def number_or_dash(value: float | None, pattern: str = ".4f") -> str:
    """Return a number as a table shows it; "-" if it is not known, or none."""
    return "-" if value is None or math.isnan(value) else format(value, pattern)


def or_none(value: Any, in_words: Callable[[Any], str] = str) -> str:
    """Return a setting's value in words; "none" if it is not set."""
    return "none" if value is None else in_words(value)


def short(number: float) -> str:
    """Return a number with three digits and the letter of its thousands: 49.2B."""
    for letter, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= 0.9995 * size:
            return f"{number / size:.3g}{letter}"
    return f"{number:.0f}"


def duration(seconds: float) -> str:
    """Return a time in the largest unit of which it has at least two."""
    for unit, size in (("days", 86400), ("h", 3600), ("min", 60)):
        if (count := seconds / size) >= 2:
            return f"{count:,.{int(count < 10)}f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def cells(text: str) -> int:
    """Return how many places of a terminal a text takes: letters of East Asia take two."""
    wide = sum(unicodedata.east_asian_width(letter) in "WF" for letter in text)
    return len(text) + wide - sum(bool(unicodedata.combining(letter)) for letter in text)


def table(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """Return rows of equally many cells as lines with aligned columns.

    The columns numbered in `right` are aligned to the right. The first row has the headings.
    """
    shown = [[harmless(cell).replace("\n", "\\n").expandtabs() for cell in row] for row in rows]
    widths = [max(map(cells, column)) for column in zip(*shown, strict=True)]

    def padded(number: int, cell: str) -> str:
        blanks = " " * (widths[number] - cells(cell))
        return blanks + cell if number in right else cell + blanks

    return ["  ".join(padded(*each) for each in enumerate(row)).rstrip() for row in shown]
