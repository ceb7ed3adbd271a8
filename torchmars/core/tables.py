"""Rows of cells as lines of plain text, for consoles and logs."""

import io
from collections.abc import Collection, Sequence

from torchmars.core.console import harmless


def table(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """Return rows of equally many cells as lines with aligned columns.

    The columns numbered in `right` are aligned to the right. The first row has the headings.
    """
    # Here, since a mistake must be said without the time that it takes to import.
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    lines = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    for number in range(len(rows[0])):
        lines.add_column(justify="right" if number in right else "left", no_wrap=True)
    for row in rows:
        lines.add_row(*(Text(harmless(cell).replace("\n", "\\n")) for cell in row))
    out = io.StringIO()
    # With both sizes, COLUMNS and LINES are not read.
    console = Console(file=out, width=100_000, height=100, color_system=None, legacy_windows=False)
    console.print(lines)
    return [line.rstrip() for line in out.getvalue().splitlines()]
