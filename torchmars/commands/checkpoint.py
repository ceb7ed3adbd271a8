"""Verify or prune the checkpoints of a run."""

import sys
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from torchmars.config.fields import Count
from torchmars.core.errors import exit_on_user_error
from torchmars.core.help import Positional
from torchmars.core.options import choose, parse


@dataclass
class Verify:
    """Read every byte and compare checksums. Exit code 2 if anything is damaged."""

    run: Positional[PurePath]
    """A run's folder."""


@dataclass
class Prune:
    """Verify, then delete the checkpoints that the run's settings do not keep."""

    run: Positional[PurePath]
    """A run's folder."""
    keep_last: Count | None = None
    """Newest checkpoints to keep. Default: the run's checkpoint.keep_last."""
    keep_every: Count | None = None
    """Steps whose multiples are kept. Default: the run's checkpoint.keep_every."""
    damaged: bool = False
    """Delete those that are not good, and *.damaged, too."""
    dry_run: bool = False
    """Delete nothing; print what would be deleted."""


OPTIONS: dict[str, Any] = {"verify": Verify, "prune": Prune}


def main() -> None:
    """Verify or prune the checkpoints of a run."""
    with exit_on_user_error():
        texts = {name: str(kind.__doc__).partition("\n")[0] for name, kind in OPTIONS.items()}
        prog = "torchmars checkpoint"
        name = choose(sys.argv[1:], texts, prog, "The checkpoints of a run.")
        options = parse(OPTIONS[name], sys.argv[2:], f"{prog} {name}")
        from torchmars.checkpoint import upkeep

        folder = upkeep.checkpoints_of(options.run)
        if isinstance(options, Verify):
            upkeep.verify_checkpoints(folder)
        else:
            kept = {"keep_last": options.keep_last, "keep_every": options.keep_every}
            asked = {name: value for name, value in kept.items() if value is not None}
            upkeep.prune_checkpoints(options.run, folder, asked, options.damaged, options.dry_run)
