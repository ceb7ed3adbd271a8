"""How far a long piece of work is: a bar on a terminal, lines in a log."""

import sys
from typing import TextIO, cast

from tqdm import tqdm

from torchmars.core.console import harmless, is_shown, say

LOG_SECONDS = 30.0  # between two lines of a log
LINE = "{desc}: {percentage:.0f}%, {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}]"


class LogLines:
    """A stream that makes lines of a bar that is drawn over itself."""

    def write(self, text: str) -> None:
        """Print a line, unless it is blank."""
        if text := text.strip("\r\n "):
            say(text, error=True)

    def flush(self) -> None:
        """Do nothing: a line is written at once."""


def progress_bar(
    what: str, total: int, unit: str, shown: bool = True, done: int = 0
) -> "tqdm[None]":
    """Return a bar of `done` of `total`. `unit` names the counted things, such as B for bytes."""
    terminal = sys.stderr is not None and sys.stderr.isatty()
    return tqdm(
        total=total,
        initial=done,
        unit=unit,
        unit_scale=True,
        desc=harmless(what),
        file=sys.stderr if terminal else cast(TextIO, LogLines()),
        mininterval=0.1 if terminal else LOG_SECONDS,
        bar_format=None if terminal else LINE,
        disable=not (shown and is_shown()),
    )
