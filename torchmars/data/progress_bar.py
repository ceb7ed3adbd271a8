"""How far a long piece of work is."""

import sys

from tqdm import tqdm

from torchmars.core.console import is_shown

LOG_SECONDS = 30.0  # between two lines of a log


def progress_bar(
    what: str, total: int, unit: str, shown: bool = True, done: int = 0
) -> "tqdm[None]":
    """Return a bar of `done` of `total`. `unit` names the counted things, such as B for bytes."""
    seconds = 0.1 if sys.stderr is not None and sys.stderr.isatty() else LOG_SECONDS
    return tqdm(
        total=total,
        initial=done,
        unit=unit,
        unit_scale=True,
        desc=what,
        mininterval=seconds,
        disable=not (shown and is_shown()),
    )
