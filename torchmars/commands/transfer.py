"""Check that learning rates of a small model hold for larger ones."""

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from torchmars.commands.compare import TrialOptions, check_options, make_grid, run_study
from torchmars.config.fields import Positive
from torchmars.config.load import load_command, require_config
from torchmars.core.check import Interval, Place, make, read_words
from torchmars.core.console import say
from torchmars.core.errors import EXIT_STOPPED, Ended, UserError, exit_on_user_error

PROG = "torchmars transfer"
# A base, which the smallest size replaces: so depth and decay may be set without one.
BASE = {"transfer": {"size": "smallest"}}


@dataclass
class CheckTransfer(TrialOptions):
    """Check that learning rates of a small model hold for larger ones.

    The smallest size is the base, whichever [transfer] names, of which depth and decay stay.
    Every size is trained at every rate. Prints and writes the best rate of each
    size, and a plot with a line for each. Whatever ends it, the same command resumes.
    """

    widths: str | None = None
    """Widths of the model: "64,128,256". What grows with them is said by the family: heads, the
    width of the MLP."""
    depths: str | None = None
    """Numbers of blocks: "2,4,8"."""
    check: bool = False
    """Train nothing: only look, in seconds, whether what models compute stays of one size after
    four steps at optimizer.lr. Exit code 1 where it does not."""
    seeds: Annotated[int, Interval(1, 1_000)] = 1
    """Seeds, from run.seed on. The first has the whole grid, the others the best rate of each size
    and its two neighbours."""
    without: bool = False
    """Also train each larger size as it is without [transfer]."""
    folder: Annotated[str, Place()] | None = None
    """Folder of the trials. Default: transfers/NAME by the config's run.name."""


def main() -> None:
    """Check, or train, the sizes that the command line names."""
    with exit_on_user_error():
        options, config, rest = load_command(CheckTransfer, sys.argv[1:], PROG, [(PROG, BASE)])
        widths = read_sizes(options.widths, "--widths")
        depths = read_sizes(options.depths, "--depths")
        if max(len(widths), len(depths)) < 2:
            raise UserError("name two sizes or more: --widths 64,128,256, or --depths 2,4,8")
        if not options.check:
            require_config(rest, PROG)
            check_options(options, config)
            grid = make_grid(options)
        from torchmars.comparison import sizes  # it brings torch, and mistakes are said before

        if options.check:
            lines, good = sizes.check_sizes(config, widths, depths, options.without)
            say(*lines)
            raise Ended(0 if good else 1)
        folder = Path(options.folder or f"transfers/{config.run.name}")
        config = replace(config, run=replace(config.run, folder=str(folder / "trials")))
        base, contenders = sizes.find_sizes(config, widths, depths, options.without)
        seeds = [config.run.seed + number for number in range(options.seeds)]
        study = sizes.SizeStudy(
            folder, rest, base, contenders, grid, seeds, None, options.widen, False
        )
        if not run_study(study, options, f"the base is {contenders[0].name}"):
            raise Ended(EXIT_STOPPED)


def read_sizes(text: str | None, option: str) -> list[int]:
    """Return the numbers of an option, in order; none if it is not given. Raises `UserError`."""
    numbers = [] if text is None else read_words([text], list[int], option)
    return sorted({*make(list[Positive], numbers, name=option)})
