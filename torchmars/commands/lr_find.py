"""Find the learning rates worth trying.

One short run raises the learning rate at each step, by the same factor, until the loss diverges.
"""

import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from torchmars.benchmark.measure import ranks_of
from torchmars.config.load import load_command, require_config
from torchmars.core.bounds import Range
from torchmars.core.console import labelled, say
from torchmars.core.errors import UserError, exit_on_user_error
from torchmars.core.result_files import check_results_file, write_results
from torchmars.core.tables import table

if TYPE_CHECKING:
    from torchmars.comparison.lr_range import LrRange

PROG = "torchmars lr-find"
ROWS = 16  # of the table
Rate = Annotated[float, Range(0, 1_000_000, open_low=True)]


@dataclass
class LrFind:
    """Find the learning rates worth trying.

    Trains the config once, in a folder that is deleted again, while optimizer.lr rises from --low
    to --high by the same factor at each step. The rates of other groups keep their ratio to it.
    Prints where the smoothed loss is lowest and where it diverges, and rates to give to torchmars
    compare. These are about the lowest rate whose loss is within 2% of the lowest.
    """

    low: Rate | None = None
    """optimizer.lr of the first step. Default: a hundredth of the config's."""
    high: Rate | None = None
    """optimizer.lr of the last step. Default: a hundred times the config's."""
    steps: Annotated[int, Range(10, 1_000_000)] = 200
    """Steps of the run."""
    json: Path | None = None
    """Write all rates and losses to this file too."""


def main() -> None:
    """Print which learning rates are worth trying for the config that the command line names."""
    with exit_on_user_error():
        options, config, rest = load_command(LrFind, sys.argv[1:], PROG)
        require_config(rest, PROG)
        check_results_file(options.json)
        low = options.low or config.optimizer.lr / 100
        high = options.high or config.optimizer.lr * 100
        if low >= high:
            raise UserError(f"--low {low:g} must be below --high {high:g}")
        from torchmars.comparison.lr_range import find_lr

        found = find_lr(config, low, high, options.steps, ranks_of(config))
        say(*range_in_words(found))
        if options.json is not None:
            write_results(options.json, asdict(found))


def range_in_words(found: "LrRange") -> list[str]:
    """Return the findings, in lines."""
    every = max(1, len(found.lrs) // ROWS)
    rows = [
        (f"{lr:.2e}", f"{loss:.4f}", f"{smoothed:.4f}")
        for lr, loss, smoothed in list(zip(found.lrs, found.losses, found.smoothed))[::every]
    ]
    diverges = (
        "nowhere: raise --high" if found.diverges is None else f"from lr {found.diverges:.2e}"
    )
    return [
        *table([("lr", "loss", "smoothed"), *rows], right=(0, 1, 2)),
        "",
        *labelled("lowest", f"{min(found.smoothed):.4f} at lr {found.lowest:.2e}"),
        *labelled("enough", f"within 2% of that from lr {found.enough:.2e} on"),
        *labelled("diverges", diverges),
        *labelled("try", "--lr-grid " + ",".join(f"{lr:.1e}" for lr in found.grid())),
    ]
