"""How far a long piece of work is."""

import sys
from types import SimpleNamespace
from typing import Any

from tqdm import tqdm

from torchmars.core.console import is_shown, write

LOG_SECONDS = 30.0  # between two times in a log
LOG: Any = SimpleNamespace(write=lambda text: write(text, sys.stderr))  # its full disk ends no work


def progress_bar(
    what: str, total: int, unit: str, shown: bool = True, done: int = 0
) -> "tqdm[None]":
    """Return a bar of `done` of `total`. `unit` names the counted things, such as B for bytes."""
    shown = shown and is_shown() and sys.stderr is not None
    terminal = shown and sys.stderr.isatty()
    to, seconds = (sys.stderr, 0.1) if terminal else (LOG, LOG_SECONDS)
    rest: Any = {"unit": unit, "unit_scale": True, "initial": done, "disable": not shown}
    return tqdm(None, what, total, file=to, mininterval=seconds, **rest)
