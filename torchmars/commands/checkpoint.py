"""Verify or prune the checkpoints of a run."""

import sys
from dataclasses import dataclass
from pathlib import PurePath
from typing import Literal

from torchmars.config.fields import Count
from torchmars.core.cli import Positional, parse
from torchmars.core.errors import exit_on_user_error


@dataclass
class Checkpoint:
    """Verify or prune the checkpoints of a run.

    verify: read every byte and compare checksums. Exit code 2 if anything is damaged. prune:
    verify, then delete the checkpoints that the run's settings do not keep.
    """

    action: Positional[Literal["verify", "prune"]]
    """verify, or prune."""
    run: Positional[PurePath]
    """A run's folder."""
    keep_last: Count | None = None
    """Of prune: newest checkpoints to keep. Default: the run's checkpoint.keep_last."""
    keep_every: Count | None = None
    """Of prune: steps whose multiples are kept. Default: the run's checkpoint.keep_every."""
    damaged: bool = False
    """Of prune: delete those that are not good, and *.damaged, too."""
    dry_run: bool = False
    """Of prune: delete nothing; print what would be deleted."""


def main() -> None:
    """Verify or prune the checkpoints of a run."""
    with exit_on_user_error():
        options, _ = parse(Checkpoint, sys.argv[1:], "torchmars checkpoint")
        from torchmars.checkpoint import upkeep

        folder = upkeep.checkpoints_of(options.run)
        if options.action == "verify":
            return upkeep.verify_checkpoints(folder)
        kept = {"keep_last": options.keep_last, "keep_every": options.keep_every}
        asked = {name: value for name, value in kept.items() if value is not None}
        upkeep.prune_checkpoints(options.run, folder, asked, options.damaged, options.dry_run)
