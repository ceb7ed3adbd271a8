"""List the runs there are: how far each is, and whether it runs."""

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePath

from torchmars.core.console import say
from torchmars.core.errors import UserError, exit_on_user_error
from torchmars.core.files import path_problem
from torchmars.core.help import Positional
from torchmars.core.options import parse
from torchmars.core.result_files import check_results_file, write_results
from torchmars.core.tables import table
from torchmars.core.words import duration, number_or_dash
from torchmars.metrics.lines import warn_of_damage
from torchmars.records.overview import Overview, find_runs, overview
from torchmars.records.run import LINES

HEADINGS = ("run", "step", "loss", "validation", "bits/byte", "tokens/s", "last write", "state")


@dataclass
class Runs:
    """List the runs there are: how far each is, and whether it runs.

    A run that neither runs nor was stopped nor is complete has failed: it was killed, or ended with
    an error. Runs up to three levels deep are listed, as in comparisons/NAME/trials/RUN.
    """

    folder: Positional[PurePath] = Path("runs")
    """Folder of runs, or one run. In an object store: by the newest checkpoint alone."""
    json: Path | None = None
    """Write the list to this file too."""


def main() -> None:
    """Print the runs in the folder that the command line names."""
    with exit_on_user_error():
        options = parse(Runs, sys.argv[1:], "torchmars runs")
        check_results_file(options.json)
        folder = options.folder
        if isinstance(folder, Path) and not folder.is_dir():
            why = path_problem(folder, "folder") or "it does not exist"
            raise UserError(f"there are no runs in {folder} ({why}): name a folder of runs")
        found: dict[PurePath, Overview | UserError] = {}
        for run in runs_in(folder):
            try:
                found[run] = overview_of(run)
            except UserError as error:
                found[run] = error
        if options.json is not None:
            write_results(options.json, runs_json(found))
        if not found:
            say(f"there are no runs in {folder}")
            return
        rows = [HEADINGS, *(run_row(run, each) for run, each in found.items())]
        say("\n".join(table(rows, right=range(1, len(HEADINGS) - 1))))
        for run, each in found.items():
            if isinstance(each, Overview) and isinstance(run, Path):
                warn_of_damage(run / LINES, each.damaged_lines)


def runs_in(folder: PurePath) -> Sequence[PurePath]:
    """Return the runs in a folder of a disk or of an object store."""
    if isinstance(folder, Path):
        return find_runs(folder)
    from torchmars.records.stored import stored_runs  # it takes torch

    return stored_runs(folder)


def overview_of(run: PurePath) -> Overview:
    """Return how far a run is. Raises `UserError` if it is damaged, or none."""
    if isinstance(run, Path):
        return overview(run)
    from torchmars.records.stored import stored_overview

    return stored_overview(run)


def run_row(folder: PurePath, run: Overview | UserError) -> tuple[str, ...]:
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
        run.state,
    )


def runs_json(found: dict[PurePath, Overview | UserError]) -> str:
    """Return the list as JSON: the known facts on each run, or its fault."""
    runs = [
        {"folder": str(folder)}
        | (asdict(each) if isinstance(each, Overview) else {"damaged": str(each)})
        for folder, each in found.items()
    ]
    return json.dumps({"runs": runs}, indent=2) + "\n"
