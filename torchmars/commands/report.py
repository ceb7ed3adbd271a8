"""Write a page of HTML that shows runs or a comparison."""

import sys
import time
from dataclasses import dataclass
from pathlib import Path

from torchmars.core.console import say
from torchmars.core.errors import UserError, exit_on_user_error
from torchmars.core.files import path_problem
from torchmars.core.help import Positional
from torchmars.core.options import parse
from torchmars.core.result_files import check_suffix
from torchmars.reports.page import write_page
from torchmars.reports.subjects import Subject

PAGE, SUFFIXES = "report.html", (".html", ".htm")
# Seconds from one page to the next with --follow.
EVERY = 20


@dataclass
class Report:
    """Write a page of HTML that shows runs or a comparison.

    It has curves to zoom, the configs and what differs between them, checkpoints, events and
    samples; of a comparison what was found, its tables and figures. The page is one file that needs
    no network. Needs the extra torchmars[report].
    """

    runs: Positional[list[Path]]
    """Folders of runs, or the folder of one comparison."""
    out: Path | None = None
    """File to write, which ends in .html. Default: report.html in the folder of the run or the
    comparison, or here where there are several runs."""
    follow: bool = False
    """Write the page again until all runs have ended. The page renews itself as often."""


def main() -> None:
    """Write the page of the runs, or of the comparison, that the command line names."""
    with exit_on_user_error():
        options = parse(Report, sys.argv[1:], "torchmars report")
        folders = options.runs
        subject = Subject(folders)
        file = options.out or (folders[0] / PAGE if len(folders) == 1 else Path(PAGE))
        check_suffix(file, SUFFIXES)
        if wrong := path_problem(file, "file"):
            raise UserError(f"--out: cannot write {file}: {wrong}")
        if options.follow:
            follow(subject, file)
        write_page(file, subject.page(file))
        for run in subject.runs:
            run.warn_of_damage()
        say(f"report    {file}")


def follow(subject: Subject, file: Path) -> None:
    """Write a page that renews itself, every `EVERY` seconds, until all has ended or Ctrl-C."""
    say(f"report    {file}, renewed every {EVERY} s; Ctrl-C ends that")
    try:
        while subject.renew():
            write_page(file, subject.page(file, EVERY))
            time.sleep(EVERY)
    except KeyboardInterrupt:
        say("")
