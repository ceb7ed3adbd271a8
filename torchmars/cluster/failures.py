"""What ranks print, on its way to files and the console, and which of them failed first.

When one dies, the others lose their connections to it and fail too. Those failures mean nothing.
"""

import contextlib
import math
import os
import re
import selectors
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from torchmars.cluster import process
from torchmars.core import console
from torchmars.core.device import COLLECTIVES
from torchmars.core.errors import ERROR_FILE, EXIT_HUNG
from torchmars.core.files import open_to_write

TRACEBACK = re.compile(r"\[rank\d+\]: ")  # begins each line of a traceback of torch's
LEFT_SECONDS = 2.0  # for what ranks that have ended have printed
LAST_LINES = 10  # of a rank, to be shown once it has failed
FALLOUT_MESSAGE = re.compile(
    r"LostRank|Dist(Network|Store|Backend)Error|closed by peer|reset by peer|broken pipe|"
    rf"{COLLECTIVES}|timed out|SIGTERM|"
    r"SIGABRT|"  # so NCCL ends a rank that waits for a dead one
    r"RuntimeError: rank \d+: ",  # an error that another rank has raised, see `Layout.on_all`
    re.IGNORECASE,
)
# What errors begin with that need no traceback.
IN_A_LINE = ("LostRank: ", "OutOfMemory: ", "LoneMistake: ")


class RankLogs(LogsSpecs):
    """Where the output of a launcher's ranks goes: `rank-00000.log` and so on, in `folder`.

    It goes through pipes in `scratch`. A thread of this process reads them and writes the files, so
    that no start overwrites the one before, and a full disk or a closed console ends no rank. The
    console gets the output of the local ranks in `shown`.
    """

    def __init__(self, folder: Path, scratch: Path, shown: set[int]) -> None:
        super().__init__(log_dir=str(scratch))
        self.folder, self.scratch, self.shown = folder, scratch, shown
        self.last: dict[int, deque[str]] = {}  # the last lines of each local rank
        self.pipes, self.files = selectors.DefaultSelector(), list[int]()
        self.ended = threading.Event()
        self.thread: threading.Thread | None = None

    @property
    def root_log_dir(self) -> str:
        """See base class."""
        return str(self.scratch)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Open the pipes of ranks with the environments `envs`; return their names."""
        self.close()  # the start before
        places = LogsDest()
        for local, env in envs.items():
            places.error_files[local] = env[ERROR_FILE] = str(self.scratch / f"error-{local}")
            Path(env[ERROR_FILE]).unlink(missing_ok=True)
            self.last[local] = deque(maxlen=LAST_LINES)
            name, file = f"{process.node()} rank {env['RANK']}", self._open(env)
            for number, streams in ((1, places.stdouts), (2, places.stderrs)):
                streams[local] = str(self.scratch / f"output-{local}-{number}")
                Path(streams[local]).unlink(missing_ok=True)
                os.mkfifo(streams[local])
                # For writing too, so that it has no end.
                pipe = os.open(streams[local], os.O_RDWR | os.O_NONBLOCK)
                shown = (sys.stdout if number == 1 else sys.stderr) if local in self.shown else None
                prefix = f"{name} | " if len(self.shown) > 1 else ""
                output = RankOutput(file, self.last[local], shown, prefix)
                self.pipes.register(pipe, selectors.EVENT_READ, output)
        self.ended.clear()
        self.thread = threading.Thread(target=self._pump, name="logs", daemon=True)
        self.thread.start()
        return places

    def file(self, rank: int) -> Path:
        """Return the file with the output of a rank."""
        return self.folder / f"rank-{rank:05d}.log"

    def close(self) -> None:
        """Wait until all that was printed has been written, and close the pipes."""
        self.ended.set()
        if self.thread is not None and self.thread.ident is not None:
            self.thread.join()
        for key in list(self.pipes.get_map().values()):
            self.pipes.unregister(key.fd)
            os.close(key.fd)
            if key.data.rest:
                key.data.write(b"\n")
        while self.files:
            os.close(self.files.pop())

    def _open(self, env: dict[str, str]) -> int | None:
        """Open the log of a rank, and write where this start begins; None if that cannot be."""
        with contextlib.suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            file = open_to_write(self.file(int(env["RANK"])), os.O_WRONLY | os.O_APPEND)
            self.files.append(file)
            now = time.strftime("%Y-%m-%d %H:%M:%S")
            whose = f"{process.node()} rank {env['RANK']} of {env['WORLD_SIZE']}"
            os.write(file, f"--- {now} {whose} ---\n".encode())
            return file
        return None

    def _pump(self) -> None:
        until = math.inf  # a process that a rank has left behind may print for ever
        while True:
            if ended := self.ended.is_set():  # first: what was printed before is read after
                until = min(until, time.monotonic() + LEFT_SECONDS)
            ready = self.pipes.select(timeout=0.1)
            for key, _ in ready:
                with contextlib.suppress(BlockingIOError):
                    key.data.write(os.read(key.fd, 2**16))
            if ended and (not ready or time.monotonic() > until):
                return


@dataclass
class RankOutput:
    """One output of one rank, line by line. What cannot be written is dropped."""

    file: int | None
    last: deque[str]
    shown: TextIO | None
    prefix: str
    rest: bytes = b""

    def write(self, data: bytes) -> None:
        """Take some bytes. The file gets all lines, the console what this process shows."""
        *lines, self.rest = (self.rest + data).split(b"\n")
        if lines and self.file is not None:
            with contextlib.suppress(OSError):
                os.write(self.file, b"\n".join([*lines, b""]))
        for line in lines:
            text = line.decode(errors="replace")
            self.last.append(text)
            is_shown = self.shown is sys.stderr or console.is_shown(text)
            if self.shown and is_shown and not TRACEBACK.match(text):  # that is for the file
                console.write(f"{self.prefix}{text}\n", self.shown)


def keep_apart(file: Path) -> None:
    """Send what torch prints in this process, a launcher, to `file` from now on.

    This package's own lines still go to the console.
    """
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        own = open_to_write(file, os.O_WRONLY | os.O_APPEND)
        sys.stderr = open(os.dup(2), "w", buffering=1, errors="backslashreplace")
        os.dup2(own, 2)
        os.close(own)


@dataclass
class Failure:
    """How one rank ended: with an exit code, or minus the number of a signal.

    The time is in seconds since 1970, as the rank or torch has noted it.
    """

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
    """Return the failure of a rank, which has printed `last_lines`.

    `hang` is the folder of the watchdogs.
    """
    code, seconds, lines = ended.exitcode, float(ended.timestamp), [*last_lines]
    if has_hung(hang, rank, ended.pid):
        text = f"error: it made no step for guards.hang_seconds; the stacks of all are in {hang}"
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


def first_of(failures: Iterable[Failure]) -> Failure:
    """Return the failure of the rank that failed first, of those of one machine."""
    return min(failures, key=lambda failure: (failure.is_fallout, failure.time, failure.rank))


def report_file(folder: Path, rank: int) -> Path:
    """Return the file of a rank: its process, what it did when it hung, and its stacks."""
    return folder / f"rank-{rank:05d}.txt"


def has_hung(folder: Path, rank: int, process: int) -> bool:
    """Return whether the watchdog has ended this process of a rank."""
    with contextlib.suppress(OSError):
        text = report_file(folder, rank).read_text(errors="replace")
        return text.startswith(f"process {process} on ") and "\nTimeout (" in text
    return False
