"""Seconds to write and to open the page of many long runs.

    python -m tests.measurements.report_open

It opens in chromium, which must be installed, with playwright. The runs are made, not trained.
Opening ends when all charts in view are drawn.
"""

import os
import statistics
import tempfile
import time
from pathlib import Path

from tests.support.browser import ALL_IN_VIEW_DRAWN, browser, open_page
from tests.support.records import made_run
from torchmars.records.run import read_run
from torchmars.reports.run_page import run_page

RUNS, STEPS, ROUNDS = 20, 100_000, 5


def main() -> None:
    """Print how long each takes."""
    with tempfile.TemporaryDirectory() as scratch:
        folders = [
            made_run(Path(scratch) / f"run-{number}", STEPS, number, lr=0.001 * (1 + number))
            for number in range(RUNS)
        ]
        began = time.perf_counter()
        runs = [read_run(folder) for folder in folders]
        for run in runs:
            run.series  # noqa: B018  # reads it
        read = time.perf_counter() - began
        began = time.perf_counter()
        text = run_page(runs)
        made = time.perf_counter() - began
        print(f"{RUNS} runs of {STEPS:,} rows, load {os.getloadavg()[0]:.1f}")
        print(f"read {read:.1f} s, page {made:.1f} s, {len(text) / 2**20:.1f} MiB")
        file = Path(scratch) / "report.html"
        file.write_text(text)
        print(f"opened in {opening(file)}")


def opening(file: Path) -> str:
    """Return the seconds from the start of navigation until all charts in view are drawn."""
    seconds = []
    with browser() as started:
        for _ in range(ROUNDS):
            began = time.perf_counter()
            opened = open_page(started, file)
            opened.wait(ALL_IN_VIEW_DRAWN)
            seconds.append(time.perf_counter() - began)
            assert not opened.messages, opened.messages
            opened.page.context.close()
    return f"{statistics.median(seconds):.2f} s ({min(seconds):.2f} to {max(seconds):.2f})"


if __name__ == "__main__":
    main()
