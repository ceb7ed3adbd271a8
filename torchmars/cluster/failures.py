"""What ranks print, on its way to files and the console, and which of them failed first.

When one dies, the others lose their connections to it and fail too. Those failures mean nothing.
"""

import contextlib
import os
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO, NamedTuple, TextIO

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from torchmars.cluster import process
from torchmars.core import console
from torchmars.core.device import COLLECTIVES
from torchmars.core.errors import ERROR_FILE, EXIT_HUNG
from torchmars.core.files import open_to_write

TRACEBACK = re.compile(r"\[rank\d+\]: ")  # begins each line of a traceback of torch's
LEFT_SECONDS = 2.0  # for what ranks that have ended have printed
END = b"\0the end of a rank\0"  # on a pipe, which a process that a rank has left may have open
LAST_LINES = 10  # of a rank, to be shown once it has failed
FALLOUT_MESSAGE = re.compile(
    r"LostRank|Dist(Network|Store|Backend)Error|closed by peer|reset by peer|broken pipe|"
    rf"{COLLECTIVES}|timed out|SIGTERM|"
    r"SIGABRT|"  # so NCCL ends a rank that waits for a dead one
    r"RuntimeError: rank \d+: ",  # an error that another rank has raised, see `Layout.on_all`
    re.IGNORECASE,
)
IN_A_LINE = ("LostRank: ", "LoneMistake: ")  # errors that need no traceback


class RankLogs(LogsSpecs):
    """Where the output of a launcher's ranks goes: `rank-00000.log` and so on, in `folder`.

    It goes through pipes in `scratch`, each to a thread of this process: torch would empty the
    files at each start, and a full disk would end ranks. The console gets that of the local ranks
    in `shown`.
    """

    def __init__(self, folder: Path, scratch: Path, shown: set[int]) -> None:
        super().__init__(log_dir=str(scratch))
        self.folder, self.scratch, self.shown = folder, scratch, shown
        self.last: dict[int, deque[str]] = {}  # the last lines of each local rank
        self.threads: dict[Path, threading.Thread] = {}  # by their pipes
        self.opened: list[BinaryIO] = []

    @property
    def root_log_dir(self) -> str:
        """See base class."""
        return str(self.scratch)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Make the pipes of ranks with the environments `envs`; return their names."""
        self.close()  # the start before
        places = LogsDest()
        for local, env in envs.items():
            places.error_files[local] = env[ERROR_FILE] = str(self.scratch / f"error-{local}")
            Path(env[ERROR_FILE]).unlink(missing_ok=True)
            self.last[local] = deque(maxlen=LAST_LINES)
            name = f"{process.node()} rank {env['RANK']}"
            log = self._open(env, name)
            prefix = f"{name} | " if len(self.shown) > 1 else ""
            for streams, stream in ((places.stdouts, sys.stdout), (places.stderrs, sys.stderr)):
                pipe = self.scratch / f"output-{local}-{streams is places.stderrs:d}"
                pipe.unlink(missing_ok=True)
                os.mkfifo(pipe)
                streams[local] = str(pipe)
                lines = open(os.open(pipe, os.O_RDWR), "rb")  # for writing too: it has no end
                shown = stream if local in self.shown else None
                to = (lines, log, self.last[local], shown, prefix)
                self.threads[pipe] = threading.Thread(target=pass_on, args=to, daemon=True)
                self.threads[pipe].start()
        return places

    def file(self, rank: int) -> Path:
        """Return the file with the output of a rank."""
        return self.folder / f"rank-{rank:05d}.log"

    def close(self) -> None:
        """Wait until all that was printed has been written, unless the console is blocked."""
        for pipe, thread in self.threads.items():
            with contextlib.suppress(OSError):
                with open(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK), "wb", 0) as end:
                    end.write(END + b"\n")
            thread.join(LEFT_SECONDS)
        self.threads.clear()
        while self.opened:
            self.opened.pop().close()

    def _open(self, env: dict[str, str], name: str) -> BinaryIO | None:
        """Open the log of a rank, and write where this start begins; None if that cannot be."""
        with contextlib.suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            log = open(self.file(int(env["RANK"])), "ab", buffering=0, opener=open_to_write)
            self.opened.append(log)
            now = time.strftime("%Y-%m-%d %H:%M:%S")
            log.write(f"--- {now} {name} of {env['WORLD_SIZE']} ---\n".encode())
            return log
        return None


def pass_on(
    lines: BinaryIO, log: BinaryIO | None, last: deque[str], shown: TextIO | None, prefix: str
) -> None:
    """Write what a rank prints, line by line, to its log and the console; drop what cannot be."""
    with lines:
        for whole in lines:
            line, end, _ = whole.removesuffix(b"\n").partition(END)
            if end and not line:
                return
            with contextlib.suppress(OSError, ValueError):
                if log:
                    log.write(line + b"\n")
            text = line.decode(errors="replace")
            last.append(text)
            is_shown = shown is sys.stderr or console.is_shown(text)
            if shown and is_shown and not TRACEBACK.match(text):  # that is for the file
                console.write(f"{prefix}{text}\n", shown)
            if end:
                return


def keep_apart(file: Path) -> None:
    """Send what torch prints in this process, a launcher, to `file`, and not our own lines."""
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        own = open_to_write(file, os.O_WRONLY | os.O_APPEND)
        sys.stderr = open(os.dup(2), "w", buffering=1, errors="backslashreplace")
        os.dup2(own, 2)
        os.close(own)


class Failure(NamedTuple):
    """How one rank ended, with an exit code or minus the number of a signal, and when."""

    rank: int
    code: int
    time: float
    message: str
    is_fallout: bool
    """Whether another rank's failure has caused it."""

    @property
    def line(self) -> str:
        """The last line of its message: the error without its place."""
        return self.message.rstrip().rpartition("\n")[2].removeprefix("error: ")

    def in_words(self, logs: RankLogs) -> str:
        """Return a line that names the rank, when it failed, how, and its log."""
        at = time.strftime("%H:%M:%S", time.localtime(self.time))
        log = f"all it printed is in {logs.file(self.rank)}"
        return f"rank {self.rank} on {process.node()} failed first, at {at}: {self.line}: {log}"


def failure_of(rank: int, ended: ProcessFailure, last_lines: Iterable[str], hang: Path) -> Failure:
    """Return the failure of a rank, whose `last_lines` say why; `hang` is the watchdogs' folder."""
    code, seconds, lines = ended.exitcode, float(ended.timestamp), [*last_lines]
    with contextlib.suppress(OSError):
        report = report_file(hang, rank).read_text(errors="replace")
        if report.startswith(f"process {ended.pid} on ") and "\nTimeout (" in report:
            text = (
                f"error: it made no step for guards.hang_seconds; the stacks of all are in {hang}"
            )
            return Failure(rank, EXIT_HUNG, seconds, text, False)
    if isinstance(ended.message, dict):  # written by @record
        error = ended.message["message"]
        text = ended.message["extraInfo"]["py_callstack"].rstrip()
        if error.startswith(IN_A_LINE):
            text = f"error: {error.partition(': ')[2]}"
    elif code < 0:
        error = ended.message
        text = "\n".join([*lines, error])
    else:
        error = f"it ended with exit code {code}"
        text = "\n".join([*lines[:-1], "; ".join([*lines[-1:], error])])  # the last one may say why
    return Failure(rank, code, seconds, text, bool(FALLOUT_MESSAGE.search(error)))


def report_file(folder: Path, rank: int) -> Path:
    """Return the file of a rank: its process, what it did when it hung, and its stacks."""
    return folder / f"rank-{rank:05d}.txt"
