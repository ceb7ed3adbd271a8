"""Rows of cells as lines of plain text, for consoles and logs."""

from collections.abc import Collection, Sequence

from rich.cells import cell_len

from torchmars.core.console import harmless


def table(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """Return rows of equally many cells as lines with aligned columns.

    The columns numbered in `right` are aligned to the right. The first row has the headings.
    """
    shown = [[harmless(cell).replace("\n", "\\n").expandtabs() for cell in row] for row in rows]
    widths = [max(map(cell_len, column)) for column in zip(*shown, strict=True)]

    def padded(number: int, cell: str) -> str:
        blanks = " " * (widths[number] - cell_len(cell))  # letters of East Asia take two places
        return blanks + cell if number in right else cell + blanks

    return ["  ".join(padded(*each) for each in enumerate(row)).rstrip() for row in shown]
