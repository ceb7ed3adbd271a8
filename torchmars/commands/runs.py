"""List the runs there are: how far each is, and whether it runs."""

import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torchmars.checkpoint.folder import other_run
from torchmars.core.console import say
from torchmars.core.errors import UserError, exit_on_user_error
from torchmars.core.files import path_problem
from torchmars.core.help import Positional
from torchmars.core.options import parse
from torchmars.core.places import local_place
from torchmars.core.result_files import check_results_file, write_results
from torchmars.core.tables import table
from torchmars.core.words import counted, duration, number_or_dash
from torchmars.records.lines import warn_of_damage
from torchmars.records.overview import Overview, find_runs, overview
from torchmars.records.run import LINES

HEADINGS = ("run", "step", "loss", "validation", "bits/byte", "tokens/s", "last write", "state")


@dataclass
class Runs:
    """List the runs there are: how far each is, and whether it runs.

    A run that neither runs nor was stopped nor is complete has failed: it was killed, or ended with
    an error. Runs up to three levels deep are listed, as in comparisons/NAME/trials/RUN.
    """

    folder: Positional[Path] = Path("runs")
    """Folder of runs, or one run."""
    json: Path | None = None
    """Write the list to this file too."""


def main() -> None:
    """Print the runs in the folder that the command line names."""
    with exit_on_user_error():
        options = parse(Runs, sys.argv[1:], "torchmars runs")
        check_results_file(options.json)
        folder = local_place(options.folder, "the folder of runs")
        if not folder.is_dir():
            why = path_problem(folder, "folder") or "it does not exist"
            remedy = other_run(folder, "name a folder of runs")
            raise UserError(f"there are no runs in {folder} ({why}): {remedy}")
        found: dict[Path, Overview | UserError] = {}
        for run in find_runs(folder):
            try:
                found[run] = overview(run)
            except UserError as error:
                found[run] = error
        if options.json is not None:
            write_results(options.json, {"runs": [known_facts(*each) for each in found.items()]})
        if not found:
            say(f"there are no runs in {folder}")
            return
        rows = [HEADINGS, *(run_row(run, each) for run, each in found.items())]
        say(*table(rows, right=range(1, len(HEADINGS) - 1)))
        for run, each in found.items():
            if isinstance(each, Overview):
                warn_of_damage(run / LINES, each.damaged_lines)


def run_row(folder: Path, run: Overview | UserError) -> tuple[str, ...]:
    """Return the cells of a run."""
    if isinstance(run, UserError):
        return (str(folder), *[""] * (len(HEADINGS) - 2), f"damaged: {run}")
    return (
        str(folder),
        f"{run.step:,}/{run.steps:,}",
        number_or_dash(run.loss),
        number_or_dash(run.validation_loss),
        number_or_dash(run.bits_per_byte, ".3f"),
        number_or_dash(run.tokens_per_second, ",.0f"),
        f"{duration(time.time() - run.written)} ago",
        f"{run.state}{machines_in_words(run)}",
    )


def machines_in_words(run: Overview) -> str:
    """Return what became of the machines of a run while it went on, if something did."""
    if not (run.left or run.joined) or run.machines is None:
        return ""
    return f", {counted(run.machines, 'machine')} ({run.left} left, {run.joined} joined)"


def known_facts(folder: Path, run: Overview | UserError) -> dict[str, Any]:
    """Return the known facts on a run, or its fault, for a file of JSON."""
    facts = {"damaged": str(run)} if isinstance(run, UserError) else asdict(run)
    return {"folder": str(folder)} | facts
