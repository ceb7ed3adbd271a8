"""What a page shows, and whether there is more to come: runs, or a comparison."""

from pathlib import Path

from torchmars.comparison.results import has_comparison, read_comparison
from torchmars.core.errors import UserError
from torchmars.records.overview import last_written, state_of
from torchmars.records.run import read_run
from torchmars.reports.comparison_page import comparison_page
from torchmars.reports.run_page import run_page


class ComparisonSubject:
    """A comparison as a page shows it."""

    def __init__(self, folder: Path) -> None:
        """Read it. Raises `UserError`."""
        self.folder = folder
        self.found = read_comparison(folder)

    def renew(self) -> bool:
        """Read what is new. Return whether there may be more to come."""
        self.found = read_comparison(self.folder)
        return any(trial.state == "pending" for trial in self.found.trials)

    def page(self, file: Path, renewed_every: int | None = None) -> str:
        """Return the page for `file`. Raises `UserError` without plotly."""
        return comparison_page(self.found, self.folder, file, renewed_every)

    def warn(self) -> None:
        """Print nothing: it has no lines that may be damaged."""


class RunsSubject:
    """Runs as a page shows them."""

    def __init__(self, folders: list[Path]) -> None:
        """Read them. Raises `UserError`."""
        self.runs = [read_run(folder) for folder in folders]
        self.written = [last_written(folder) for folder in folders]

    def renew(self) -> bool:
        """Read what is new. Return whether there may be more to come."""
        for number, run in enumerate(self.runs):
            if (now := last_written(run.folder)) != self.written[number]:
                self.runs[number], self.written[number] = read_run(run.folder), now
        return any(state_of(run) == "running" for run in self.runs)

    def page(self, file: Path, renewed_every: int | None = None) -> str:
        """Return the page. Raises `UserError` without plotly."""
        return run_page(self.runs, renewed_every)

    def warn(self) -> None:
        """Print how many lines of the files are damaged and left out."""
        for run in self.runs:
            run.warn_of_damage()


Subject = ComparisonSubject | RunsSubject


def subject_of(folders: list[Path]) -> Subject:
    """Return what a page of `folders` shows. Raises `UserError`."""
    compared = [folder for folder in folders if has_comparison(folder)]
    if not compared:
        return RunsSubject(folders)
    if len(folders) > 1:
        raise UserError(f"{compared[0]} is a comparison: name it alone, or runs in its place")
    return ComparisonSubject(folders[0])
