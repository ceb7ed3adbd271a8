"""The watchdog: it finds a rank that hangs, and reports where every rank stands."""

import contextlib
import faulthandler
import json
import os
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any, TextIO

import torch._C._distributed_c10d as c10d

from torchmars.cluster import process
from torchmars.cluster.hangs import hang_report, place_of_rank, report_file
from torchmars.core.console import say
from torchmars.core.device import backend_of
from torchmars.core.errors import EXIT_HUNG, file_errors
from torchmars.core.files import open_to_write
from torchmars.parallel.layout import Layout

PACKAGE = str(Path(__file__).parents[1])
GRACE_SECONDS = 10.0  # for the other ranks to notice too
WITNESSES = 8  # ranks that read what all have written, the first of which prints it
REPORT_SECONDS = 50.0  # for a rank to write where it stands


class Watchdog:
    """Ends the process with code 70 once `seconds` have passed since its last heartbeat.

    `with Watchdog(...) as watchdog:`, and `watchdog.beat(...)` from time to time. Before the end
    each rank writes the stacks of its threads to `folder`/rank-00000.txt, and what torch's flight
    recorder has of collectives to `folder`/flight_0, which `torchfrtrace` reads. The first
    rank that can, of eight, prints a line for each. 0 seconds: it watches nothing.
    """

    def __init__(self, folder: Path, layout: Layout, seconds: float, save_group: str) -> None:
        """`save_group` names the process group of the save thread's collectives."""
        self.folder, self.layout, self.seconds = folder, layout, seconds
        self.save_group = save_group
        self.on_nccl = backend_of(layout.device.type) == "nccl"
        self.file = report_file(folder, layout.world.rank)
        self.stream: TextIO | None = None  # of `file`, while it watches
        self.thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self.ended = threading.Event()
        self.watched = threading.get_ident()
        """The thread that trains. In a program of the user's it need not be the main one."""
        self.activity, self.last_beat = "", 0.0
        self.beat("the first step")

    def __enter__(self) -> "Watchdog":
        if self.seconds:
            self.layout.on_all(self._open)
            self._postpone_dump()
            self.thread.start()
        return self

    def __exit__(self, *exception: Any) -> None:
        if self.stream is not None:
            self.ended.set()
            self.thread.join()
            faulthandler.cancel_dump_traceback_later()
            self.stream.close()
            self.file.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # the last rank deletes the folder
                self.folder.rmdir()

    def beat(self, activity: str) -> None:
        """Make a heartbeat: this rank does not hang, and `activity` comes next."""
        self.activity, self.last_beat = activity, time.monotonic()

    def _open(self) -> None:
        """Open the file now: when a rank hangs may be too late."""
        remedy = "make room, or set run.folder to a folder you can write"
        with file_errors(f"cannot write to {self.folder}", remedy):
            self.folder.mkdir(parents=True, exist_ok=True)
            for old in (self.file, self._flight_file()):
                old.unlink(missing_ok=True)
            self.stream = open(self.file, "w", opener=open_to_write)
            print(f"process {os.getpid()} on {process.node()}", file=self.stream, flush=True)

    def _watch(self) -> None:
        poll = min(1.0, self.seconds / 4)
        while not self.ended.wait(poll):
            self._postpone_dump()
            if time.monotonic() - self.last_beat > self.seconds:
                # The report may block too: it asks the GPU and the disk.
                self._end_in(GRACE_SECONDS + REPORT_SECONDS)
                try:
                    self._report()
                finally:
                    os._exit(EXIT_HUNG)

    def _postpone_dump(self) -> None:
        """Put off the interpreter's own watchdog.

        It is for a process in which not even the watching thread gets its turn. By then the other
        ranks have reported where they stand.
        """
        self._end_in(self.seconds + 3 * GRACE_SECONDS)

    def _end_in(self, seconds: float) -> None:
        """Let the interpreter's own watchdog write the stacks and end the process with 1 then.

        The launcher makes 70 of the 1.
        """
        assert self.stream is not None
        faulthandler.dump_traceback_later(seconds, exit=True, file=self.stream)

    def _report(self) -> None:
        """Write where this rank stands. The first rank that can prints the reports of all."""
        assert self.stream is not None
        recorded = recorded_collectives(self.on_nccl, self.save_group)
        place = describe_place(sys._current_frames()[self.watched], recorded)
        rank, size = self.layout.world.rank, self.layout.world.size
        seconds = time.monotonic() - self.last_beat
        with contextlib.suppress(OSError):
            line = f"rank {rank}: {seconds:.0f} s in {self.activity}: {place}"
            print(line, file=self.stream, flush=True)
            faulthandler.dump_traceback(self.stream)
            with open(self._flight_file(), "wb", opener=open_to_write) as flight:
                flight.write(flight_record(self.on_nccl))
        if rank >= WITNESSES:
            time.sleep(GRACE_SECONDS)
        elif rank == min(set(range(size)) - self._wait_for_others()):
            say(hang_report(self.folder, size, self.seconds), error=True)

    def _wait_for_others(self) -> set[int]:
        """Wait until every rank has written where it stands; return those that did not.

        Many are asked less often: each is a file to open.
        """
        silent = set(range(self.layout.world.size)) - {self.layout.world.rank}
        deadline = time.monotonic() + GRACE_SECONDS
        while silent and time.monotonic() <= deadline:
            time.sleep(max(0.2, self.layout.world.size / 2000))
            silent = {rank for rank in silent if place_of_rank(self.folder, rank) is None}
        return silent

    def _flight_file(self) -> Path:
        return self.folder / f"flight_{self.layout.world.rank}"


# torch's flight recorder: private API, torch 2.11 to 2.15, which torch's stubs leave out.


def flight_record(on_nccl: bool) -> bytes:
    """Return the records of the flight recorder, for `torchfrtrace`."""
    return getattr(c10d, "_dump_nccl_trace" if on_nccl else "_dump_fr_trace")()


def recorded_collectives(on_nccl: bool, left_out: str) -> list[dict[str, Any]]:
    """Return the flight recorder's collectives, except a group's, oldest first."""
    name = "_dump_nccl_trace_json" if on_nccl else "_dump_fr_trace_json"
    record = getattr(c10d, name)(includeCollectives=True, onlyActive=False)
    entries = json.loads(record).get("entries", [])
    return [entry for entry in entries if entry["process_group"][0] != left_out]


def describe_place(frame: Any, recorded: list[dict[str, Any]]) -> str:
    """Return where a thread stands, in words, and the line of this package that called it.

    Where it waits in a collective, that is named. On NCCL, whose collectives run beside the host,
    it is the first of those `recorded` that has not completed. gloo records beginnings only: there
    it is the last one, if the thread is inside torch.distributed.
    """
    stack = traceback.extract_stack(frame)
    inner = stack[-1]
    ours = (entry for entry in reversed(stack) if entry.filename.startswith(PACKAGE))
    own = next(ours, stack[0])
    pending = [
        entry
        for entry in recorded
        if entry["profiling_name"].startswith("nccl:") and entry["state"] != "completed"
    ]
    called = stack[stack.index(own) + 1 :]
    if not pending and any(f"torch{os.sep}distributed" in entry.filename for entry in called):
        pending = recorded[-1:]
    if pending:
        place = f"waiting in the collective {describe_collective(pending[0])}"
    else:
        place = f"in {inner.name} ({inner.filename}:{inner.lineno}), in no collective"
        place += f"; the last was {describe_collective(recorded[-1])}" if recorded else ""
    return f"{place}; called from {own.name} ({Path(own.filename).name}:{own.lineno})"


def describe_collective(entry: dict[str, Any]) -> str:
    """Return a collective of the flight recorder in words."""
    return (
        f"{entry['profiling_name']} number {entry['collective_seq_id']} "
        f"of group {entry['process_group'][0]}, sizes {entry['input_sizes']}"
    )
