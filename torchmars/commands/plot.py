"""Draw the curves of runs: a PNG and an SVG."""

import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path

from torchmars.core.console import say
from torchmars.core.errors import exit_on_user_error, missing_package
from torchmars.core.help import Positional
from torchmars.core.options import parse
from torchmars.core.result_files import check_suffix
from torchmars.records.run import Along, read_runs

SUFFIXES = (".png", ".svg")


@dataclass
class Plot:
    """Draw the curves of runs: a PNG and an SVG.

    Has a panel for each of: loss, validation, learning rate, gradient norm, clip rate, cosine of
    successive gradients, tokens per second, time of a step, memory, and anything else that the runs
    have measured. Several runs are drawn over one another. Vertical lines are rollbacks and
    restarts.
    """

    runs: Positional[list[Path]]
    """Folders of runs."""
    x: Along = "tokens"
    """The x axis. Seconds count training alone."""
    out: Path | None = None
    """A folder for plot.png and plot.svg, or one file that ends in .png or .svg. A folder that has
    a dot in its name must exist. Default: the run's folder or, for several runs, this one."""


def main() -> None:
    """Draw the runs that the command line names."""
    with exit_on_user_error():
        options = parse(Plot, sys.argv[1:], "torchmars plot")
        if importlib.util.find_spec("matplotlib") is None:
            raise missing_package("matplotlib", "torchmars plot", "plot")
        from torchmars.reports.plots import plot_runs

        runs = read_runs(options.runs)
        files = files_of(options)
        plot_runs(runs, options.x, files)
        for run in runs:
            run.warn_of_damage()
        for file in files:
            say(f"wrote {file}")


def files_of(options: Plot) -> list[Path]:
    """Return the files to write. Raises `UserError` for one that is no PNG and no SVG."""
    out = options.out
    if out is None:
        out = options.runs[0] if len(options.runs) == 1 else Path()
    if out.is_dir() or not (out.suffix or out.exists()):
        return [out / f"plot{suffix}" for suffix in SUFFIXES]
    check_suffix(out, SUFFIXES, "a folder that exists")
    return [out]
