"""Counts and times in messages."""

import pytest

from torchmars.core.words import counted, duration


def test_one_is_no_plural():
    assert [counted(n, "rank") for n in (0, 1, 2, 12345)] == [
        "0 ranks",
        "1 rank",
        "2 ranks",
        "12,345 ranks",
    ]
    assert counted(1, "process", "processes") == "1 process"
    assert counted(3, "process", "processes") == "3 processes"


@pytest.mark.parametrize(
    "seconds,text",
    [
        (0, "0 s"),
        (-5, "0 s"),
        (119, "119 s"),
        (120, "2 min"),
        (7200, "2 h"),
        (2e5, "2 days"),
        (4e8, "4,629 days"),
    ],
)
def test_times(seconds, text):
    assert duration(seconds) == text
