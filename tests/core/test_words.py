"""Counts and times in messages."""

import pytest

from torchmars.core.words import counted, duration, short


def test_one_is_no_plural():
    assert [counted(n, "rank") for n in (0, 1, 2, 12345)] == [
        "0 ranks",
        "1 rank",
        "2 ranks",
        "12,345 ranks",
    ]
    assert counted(1, "process", "processes") == "1 process"
    assert counted(3, "process", "processes") == "3 processes"


def test_short_numbers():
    numbers = (999, 1234, 124e6, 999.9e6, 49.152e9, 15.6e12)
    assert [short(number) for number in numbers] == "999 1.23k 124M 1B 49.2B 15.6T".split()


@pytest.mark.parametrize(
    "seconds,text",
    [
        (0, "0 s"),
        (-5, "0 s"),
        (119, "119 s"),
        (120, "2.0 min"),
        (7260 * 12, "24 h"),
        (2e5, "2.3 days"),
        (4e8, "4,630 days"),
    ],
)
def test_times(seconds, text):
    assert duration(seconds) == text
