"""The output of ranks.

A file of the run folder for each rank gets all of it, with time, machine and rank before each line.
The console gets the output of the ranks that are shown.
"""

import codecs
import contextlib
import os
import re
import selectors
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest

from torchmars.cluster import process
from torchmars.core.console import harmless, is_shown
from torchmars.core.errors import EXIT_LEFT, EXIT_REGROUP
from torchmars.core.files import is_at, open_to_write

TRACEBACK = re.compile(rb"\[rank\d+\]: ")  # begins each line of a traceback of torch's
LAST_LINES = 10  # of a rank, to be shown once it has failed


class RankLogs(DefaultLogsSpecs):
    """torchrun's description of where the output of its ranks goes.

    It goes into pipes. A thread of this process reads them and writes the files, so that nothing is
    lost of a rank that dies at once. Output that cannot be written anywhere is dropped.
    """

    def __init__(self, folder: Path, scratch: Path, shown: set[int]) -> None:
        """Log to the run's `folder` of logs, by pipes in `scratch`.

        `shown` are the local ranks whose output the console gets.
        """
        super().__init__(log_dir=str(scratch))
        self.folder, self.shown = folder, shown
        self.last: dict[int, deque[str]] = {}  # the last lines of each rank
        self.machines = self.ranks = 1
        self.launch = ""  # the same on all machines, another one at each start of the ranks
        self.round = ""  # of the machines' meeting; empty on one machine
        # A rank that knows how the run ends writes the run's exit code here.
        self.exit_code_file = scratch / "exit-code"
        self.store_file = scratch / "store"
        self.notes = scratch  # see process.NOTES
        self.pipes = selectors.DefaultSelector()
        self.ended = threading.Event()
        self.thread: threading.Thread | None = None

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Open the pipes of ranks with the environments `envs`; return their names.

        torchrun calls this before each start of its ranks.
        """
        places = super().reify(envs)
        self.close()  # the start before
        for file in (self.exit_code_file, self.store_file, self.notes / process.REGROUP):
            file.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
        for local, env in envs.items():
            self.launch = f"{env['MASTER_ADDR']}-{env['MASTER_PORT']}"
            rank, self.machines = int(env["RANK"]), int(env["GROUP_WORLD_SIZE"])
            self.ranks = int(env["WORLD_SIZE"])
            env[process.STORE_FILE] = str(self.store_file) if self.machines == 1 else ""
            env[process.ROUND] = self.round
            env[process.NOTES] = str(self.notes)
            self.last[rank] = deque(maxlen=LAST_LINES)
            outputs = ((1, 1, places.stdouts), (2, sys.stderr.fileno(), places.stderrs))
            for number, console, streams in outputs:
                streams[local] = f"{places.error_files[local]}.{number}"
                os.mkfifo(streams[local])
                # For writing too, so that it has no end.
                pipe = os.open(streams[local], os.O_RDWR | os.O_NONBLOCK)
                stream = RankOutput(
                    self.file(rank),
                    f"{process.node()} rank {rank} | ",
                    console if local in self.shown else None,
                    len(self.shown) > 1,
                    self.last[rank],
                )
                self.pipes.register(pipe, selectors.EVENT_READ, stream)
        self.ended.clear()
        self.thread = threading.Thread(target=self._pump, name="logs", daemon=True)
        self.thread.start()
        return places

    def file(self, rank: int) -> Path:
        """Return the file with the output of a rank."""
        return self.folder / f"rank-{rank:05d}.log"

    def exit_code(self) -> int | None:
        """Return the run's exit code if a rank of this machine has left it."""
        code = self.code_of_ranks()
        return None if code in (EXIT_REGROUP, EXIT_LEFT) else code

    def code_of_ranks(self) -> int | None:
        """Return the code that a rank of this machine has left, with which the run may go on."""
        text = self.exit_code_file.read_text() if self.exit_code_file.exists() else ""
        return int(text) if text else None

    def leave_note(self, name: str, text: str = "") -> None:
        """Tell the ranks something while they make steps. If the disk refuses it, they go on."""
        with contextlib.suppress(OSError):
            (self.notes / name).write_text(text)

    def close(self) -> None:
        """Wait until all that was printed has been written, and close the pipes."""
        self.ended.set()
        if self.thread is not None:
            self.thread.join()

    def _pump(self) -> None:
        while True:
            ended = self.ended.is_set()  # first: what was printed before is read after
            ready = self.pipes.select(timeout=0.1)
            for key, _ in ready:
                with contextlib.suppress(BlockingIOError):
                    key.data.write(os.read(key.fd, 2**16))
            if ended and not ready:
                for key in list(self.pipes.get_map().values()):
                    self.pipes.unregister(key.fd)
                    os.close(key.fd)
                    key.data.close()
                return


def keep_apart(file: Path) -> None:
    """Send torch's output in this process, a launcher, to `file` from now on.

    These are warnings of its loggers and stacks of C++. This package's own lines still go to the
    console.
    """
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        own = open_to_write(file, os.O_WRONLY | os.O_APPEND)
        sys.stderr = open(os.dup(2), "w", buffering=1, errors="backslashreplace")
        os.dup2(own, 2)
        os.close(own)


@dataclass
class RankOutput:
    """One output of one rank, which goes to its file and to the console.

    The console gets it as it is or, where it is `marked`, line by line with the rank before each.
    Of stdout it gets only the lines that this process shows.
    """

    path: Path
    prefix: str
    console: int | None
    marked: bool
    last: deque[str]

    def __post_init__(self) -> None:
        self.filtered = self.console == 1 and not is_shown()
        self.rest = b""
        self.hidden, self.line_ended = False, True
        # A terminal gets whole characters that do not steer it.
        self.decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
        self.file: int | None = None
        self._open()

    def write(self, data: bytes) -> None:
        """Take some bytes."""
        if self.file is not None and not is_at(self.file, self.path):
            self._begin_anew(self.file)
        if not (self.marked or self.filtered):
            self._show(self._without_tracebacks(data))
        *lines, self.rest = (self.rest + data).split(b"\n")
        for line in lines:
            self._line(line)

    def _without_tracebacks(self, data: bytes) -> bytes:
        """Return the console's part of `data`: the launcher says in a line how a rank failed."""
        shown = []
        for part in data.splitlines(keepends=True):
            if self.line_ended:
                self.hidden = TRACEBACK.match(part) is not None
            shown += [] if self.hidden else [part]
            self.line_ended = part.endswith(b"\n")
        return b"".join(shown)

    def close(self) -> None:
        """Write the last line, which has no end yet, and close the file."""
        if self.rest:
            self._line(self.rest)
            self.rest = b""
        if self.file is not None:
            os.close(self.file)
            self.file = None

    def _open(self) -> None:
        with contextlib.suppress(OSError):
            self.file = open_to_write(self.path, os.O_WRONLY | os.O_APPEND)

    def _begin_anew(self, former: int) -> None:
        """Go on in a new file, unless the run's folder is gone with the `former` one."""
        self.file = None
        with contextlib.suppress(OSError):
            self.path.parent.mkdir()
        self._open()
        os.close(former)

    def _line(self, line: bytes) -> None:
        text = line.decode(errors="replace")
        self.last.append(text)
        whole = self.prefix.encode() + line + b"\n"
        self._put(self.file, time.strftime("%Y-%m-%d %H:%M:%S ").encode() + whole)
        shown = is_shown(text) if self.filtered else self.marked
        if shown and not TRACEBACK.match(line):
            self._show(whole if self.marked else line + b"\n")

    def _show(self, data: bytes) -> None:
        if self.console is not None and os.isatty(self.console):
            # Progress bars go back to the start of their line.
            parts = self.decoder.decode(data).split("\r")
            data = "\r".join(map(harmless, parts)).encode()
        self._put(self.console, data)

    @staticmethod
    def _put(descriptor: int | None, data: bytes) -> None:
        if descriptor is not None:
            with contextlib.suppress(OSError):
                os.write(descriptor, data)
