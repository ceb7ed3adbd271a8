"""Counts, numbers, times and tables in the words of messages."""

import math
from collections.abc import Collection, Sequence

from torchmars.core.console import harmless


def counted(number: int, thing: str, things: str = "") -> str:
    """Return a number and what it counts: 1 `thing`, else `things`, by default with an s."""
    return f"{number:,} {thing if number == 1 else things or f'{thing}s'}"


def number_or_dash(value: float | None, pattern: str = ".4f") -> str:
    """Return a number as a table shows it; "-" if it is not known, or none."""
    return "-" if value is None or math.isnan(value) else format(value, pattern)


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


def table(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """Return rows of equally many cells as lines with aligned columns.

    The columns numbered in `right` are aligned to the right. The first row has the headings.
    """
    shown = [[harmless(cell).replace("\n", "\\n") for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    sides = [">" if number in right else "<" for number in range(len(widths))]
    return [
        "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths)).rstrip()
        for row in shown
    ]
