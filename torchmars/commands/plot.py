"""Draw runs, or a comparison: pictures, or a page."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchmars.comparison.results import RESULTS_FILE, read_comparison
from torchmars.core.cli import Positional, parse
from torchmars.core.console import say
from torchmars.core.errors import UserError, exit_on_user_error, needs_package
from torchmars.records.run import read_runs


@dataclass
class Plot:
    """Draw runs, or a comparison: a PNG and an SVG, or a page of HTML.

    Of runs: training loss, validation loss, learning rate and tokens per second, over steps.
    Several runs are drawn over one another; dotted lines are restarts. Of a comparison: validation
    losses over tokens, and final losses by learning rate.
    """

    runs: Positional[list[Path]]
    """Folders of runs, or the folder of one comparison."""
    all: bool = False
    """Also draw all else that the runs have measured."""
    html: bool = False
    """Write one page to mail instead, plot.html: the same picture, with settings and events, or the
    tables of a comparison. It needs no network and has no path of this machine."""
    out: Path | None = None
    """The folder to write to. Default: that of the run or the comparison or, for several runs, this
    one."""


def main() -> None:
    """Draw what the command line names."""
    with exit_on_user_error():
        options, _ = parse(Plot, sys.argv[1:], "torchmars plot")
        with needs_package("matplotlib", "torchmars plot", "plot"):
            from torchmars.reports import figures, page

        files = files_of(options)
        content: Any
        compared = [each for each in options.runs if (each / RESULTS_FILE).is_file()]
        if compared and options.runs[1:]:
            raise UserError(f"{compared[0]} is a comparison: name it alone, or runs in its place")
        if compared:
            draw: Any = page.comparison_page if options.html else figures.comparison_figure
            content = draw(read_comparison(compared[0]))
        else:
            runs = read_runs(options.runs)
            draw = page.run_page if options.html else figures.runs_figure
            content = draw(runs, options.all)
            for run in runs:
                run.warn_of_damage()
        if content is None:
            raise UserError(
                f"{options.runs[0]} has nothing to draw yet: wait for its second report"
            )
        figures.write_files(content, files)
        for file in files:
            say(f"wrote {file}")


def files_of(options: Plot) -> list[Path]:
    """Return the files to write."""
    default = options.runs[0] if len(options.runs) == 1 else Path()
    suffixes = (".html",) if options.html else (".png", ".svg")
    return [(options.out or default) / f"plot{suffix}" for suffix in suffixes]
