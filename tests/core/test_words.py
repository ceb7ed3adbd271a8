"""Counts in messages."""

from torchmars.core.words import counted


def test_one_is_no_plural():
    assert [counted(n, "rank") for n in (0, 1, 2, 12345)] == [
        "0 ranks",
        "1 rank",
        "2 ranks",
        "12,345 ranks",
    ]
    assert counted(1, "process", "processes") == "1 process"
    assert counted(3, "process", "processes") == "3 processes"
