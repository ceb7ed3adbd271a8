"""What a page shows, and whether there is more to come: runs, or a comparison."""

from pathlib import Path

from torchmars.comparison.results import RESULTS_FILE, Comparison, read_comparison
from torchmars.core.errors import UserError
from torchmars.records.overview import last_written, state_of
from torchmars.records.run import Run, read_run, read_runs
from torchmars.reports.comparison_page import comparison_page
from torchmars.reports.run_page import run_page


class Subject:
    """Runs or a comparison as a page shows them."""

    def __init__(self, folders: list[Path]) -> None:
        """Read them. Raises `UserError`."""
        compared = [folder for folder in folders if (folder / RESULTS_FILE).is_file()]
        if compared and len(folders) > 1:
            raise UserError(f"{compared[0]} is a comparison: name it alone, or runs in its place")
        self.folders = folders
        self.comparison: Comparison | None = read_comparison(compared[0]) if compared else None
        self.runs: list[Run] = [] if compared else read_runs(folders)
        self.written = [last_written(run.folder) for run in self.runs]

    def renew(self) -> bool:
        """Read what is new. Return whether there may be more to come."""
        if self.comparison is not None:
            self.comparison = read_comparison(self.folders[0])
            return any(trial.state == "pending" for trial in self.comparison.trials)
        for number, run in enumerate(self.runs):
            if (now := last_written(run.folder)) != self.written[number]:
                self.runs[number], self.written[number] = read_run(run.folder), now
        return any(state_of(run) == "running" for run in self.runs)

    def page(self, file: Path, renewed_every: int | None = None) -> str:
        """Return the page for `file`. Raises `UserError` without plotly."""
        if self.comparison is not None:
            return comparison_page(self.comparison, self.folders[0], file, renewed_every)
        return run_page(self.runs, renewed_every)
