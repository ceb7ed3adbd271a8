"""Tables are plain text: aligned, neither cut nor coloured."""

from torchmars.core.console import labelled
from torchmars.core.tables import table


def test_columns_are_aligned():
    rows = [("rule", "lr", "clip"), ("mars-m", "0.02", ""), ("[red]x", "1", "off")]
    assert table(rows) == ["rule    lr    clip", "mars-m  0.02", "[red]x  1     off"]
    assert table(rows, right=[1])[2] == "[red]x     1  off"


def test_long_cells_are_not_cut():
    assert table([("a", "b"), ("x" * 500, "y" * 500)])[1] == "x" * 500 + "  " + "y" * 500


def test_the_label_stands_before_the_first_line():
    assert labelled("disk", "1 GiB", "2 GiB") == ["disk      1 GiB", "          2 GiB"]
