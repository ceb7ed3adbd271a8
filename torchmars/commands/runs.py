"""List the runs there are: how far each is, and whether it runs."""

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchmars.checkpoint.folder import other_run
from torchmars.core.cli import Positional, parse, write_results
from torchmars.core.console import say
from torchmars.core.errors import UserError, exit_on_user_error
from torchmars.core.places import local_place
from torchmars.core.words import counted, duration, number_or_dash, table
from torchmars.records.lines import warn_of_damage
from torchmars.records.overview import find_runs, overview
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
        options, _ = parse(Runs, sys.argv[1:], "torchmars runs")
        folder = local_place(options.folder, "the folder of runs")
        if not folder.is_dir():
            remedy = other_run(folder, "name a folder of runs")
            raise UserError(f"there is no folder {folder}: {remedy}")
        found = {run: facts_of_run(run) for run in find_runs(folder)}
        if options.json is not None:
            listed = [{"folder": str(run)} | facts for run, facts in found.items()]
            write_results(options.json, {"runs": listed})
        if not found:
            say(f"there are no runs in {folder}")
            return
        rows = [HEADINGS, *(run_row(str(run), facts) for run, facts in found.items())]
        say(*table(rows, right=range(1, len(HEADINGS) - 1)))
        for run, facts in found.items():
            warn_of_damage(run / LINES, facts.get("damaged_lines", 0))


def facts_of_run(folder: Path) -> dict[str, Any]:
    """Return the known facts on a run, or what is `damaged` of it."""
    try:
        return overview(folder)
    except UserError as error:
        return {"damaged": str(error)}


def run_row(folder: str, facts: dict[str, Any]) -> tuple[str, ...]:
    """Return the cells of a run."""
    if "damaged" in facts:
        return (folder, *[""] * (len(HEADINGS) - 2), f"damaged: {facts['damaged']}")
    state, left, joined = facts["state"], facts["left"], facts["joined"]
    if left or joined:
        machines = counted(facts["machines"] or 0, "machine")
        state += f", {machines} ({left} left, {joined} joined)"
    return (
        folder,
        f"{facts['step']:,}/{facts['steps']:,}",
        number_or_dash(facts["loss"]),
        number_or_dash(facts["validation_loss"]),
        number_or_dash(facts["bits_per_byte"], ".3f"),
        number_or_dash(facts["tokens_per_second"], ",.0f"),
        f"{duration(time.time() - facts['written'])} ago",
        state,
    )
