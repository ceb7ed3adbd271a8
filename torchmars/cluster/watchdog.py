"""Finds a rank that hangs, and says where every rank stands."""

import contextlib
import faulthandler
import json
import os
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import torch._C._distributed_c10d as c10d

from torchmars.cluster import process
from torchmars.core.console import say
from torchmars.core.errors import EXIT_HUNG, UserError
from torchmars.parallel.layout import Layout

PACKAGE = str(Path(__file__).parents[1])
GRACE_SECONDS = 10.0  # for the other ranks to notice too
BLOCKED = "Timeout ("  # so the interpreter's own watchdog begins


class Watchdog:
    """`with Watchdog(...) as watchdog:` ends the process with code 70 once `seconds` have passed since the last `watchdog.beat`.

    Before that, each rank writes the stacks of its threads to `folder`/rank-00000.txt and what torch's flight recorder has of collectives to
    `folder`/flight_0, which `torchfrtrace` reads. The first rank that can prints a line for each.
    0 seconds: it watches nothing.
    """

    def __init__(self, folder: Path, layout: Layout, seconds: float, aside: str) -> None:
        """`aside` names a process group whose collectives are another thread's: a save's."""
        self.folder, self.layout, self.seconds, self.aside = folder, layout, seconds, aside
        self.file = file_of(folder, layout.world.rank)
        self.on_gpu = layout.device.type == "cuda"
        self.ended = threading.Event()
        self.beat("the first step")

    def __enter__(self) -> "Watchdog":
        if self.seconds:
            self.layout.agree(self._open)
            self.thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
            self._arm()
            self.thread.start()
        return self

    def __exit__(self, *exception: Any) -> None:
        if self.seconds:
            self.ended.set()
            self.thread.join()
            faulthandler.cancel_dump_traceback_later()
            self.stream.close()
            self.file.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # the last one tidies up
                self.folder.rmdir()

    def _open(self) -> None:
        """Make the file now: when a rank hangs may be too late."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for old in (self.file, self._flight()):
                old.unlink(missing_ok=True)
            self.stream = self.file.open("w")
            print(f"process {os.getpid()} on {process.node()}", file=self.stream, flush=True)
        except OSError as error:
            raise UserError(
                f"cannot write to {self.folder}: {error.strerror}: make room, or set run.folder to a folder you can write"
            ) from None

    def beat(self, doing: str) -> None:
        """Say that all is well, and what comes next."""
        self.doing, self.at = doing, time.monotonic()

    def _watch(self) -> None:
        poll = min(1.0, self.seconds / 4)
        while not self.ended.wait(poll):
            self._arm()
            if time.monotonic() - self.at > self.seconds:
                faulthandler.cancel_dump_traceback_later()
                try:
                    self._report()
                finally:
                    os._exit(EXIT_HUNG)

    def _arm(self) -> None:
        """Put off the interpreter's own watchdog: it writes the stacks and ends the process with 1.

        It is for a process where not even the watching thread gets its turn. By then the other
        ranks have said where they stand. The launcher makes 70 of the 1.
        """
        seconds = self.seconds + 3 * GRACE_SECONDS
        faulthandler.dump_traceback_later(seconds, exit=True, file=self.stream)

    def _report(self) -> None:
        main = sys._current_frames()[threading.main_thread().ident]
        mine = f"rank {self.layout.world.rank}: {time.monotonic() - self.at:.0f} s in {self.doing}: {where(main, self._recorded())}"
        with contextlib.suppress(OSError):
            print(mine, file=self.stream, flush=True)
            faulthandler.dump_traceback(self.stream)
            self._flight().write_bytes(
                (c10d._dump_nccl_trace if self.on_gpu else c10d._dump_fr_trace)()
            )
        silent = self._wait_for_others()
        if self.layout.world.rank == min(set(range(self.layout.world.size)) - silent):
            say(hang_report(self.folder, self.layout.world.size, self.seconds), error=True)

    def _wait_for_others(self) -> set[int]:
        """Wait until every rank has written its word; those that do not."""
        silent = set(range(self.layout.world.size)) - {self.layout.world.rank}
        deadline = time.monotonic() + GRACE_SECONDS
        while silent := {rank for rank in silent if word_of(self.folder, rank) is None}:
            if time.monotonic() > deadline:
                break
            time.sleep(0.2)
        return silent

    def _recorded(self) -> list[dict[str, Any]]:
        """The collectives of this rank, without those of the save thread, by torch's flight recorder (private API, torch 2.11 to 2.13)."""
        dump = (
            c10d._dump_nccl_trace_json(includeCollectives=True, onlyActive=False)
            if self.on_gpu
            else c10d._dump_fr_trace_json(includeCollectives=True, onlyActive=False)
        )
        return [
            entry
            for entry in json.loads(dump).get("entries", [])
            if entry["process_group"][0] != self.aside
        ]

    def _flight(self) -> Path:
        return self.folder / f"flight_{self.layout.world.rank}"


def file_of(folder: Path, rank: int) -> Path:
    """Where a rank writes its process, its word once it finds a hang, and its stacks."""
    return folder / f"rank-{rank:05d}.txt"


def lines_of(folder: Path, rank: int) -> list[str]:
    """The lines of a rank's file; none where there is no file."""
    with contextlib.suppress(OSError):
        return file_of(folder, rank).read_text(errors="replace").splitlines()
    return []


def word_of(folder: Path, rank: int) -> str | None:
    """What a rank that has found a hang wrote of itself."""
    words = (line for line in lines_of(folder, rank) if line.startswith(f"rank {rank}: "))
    return next(words, None)


def was_blocked(folder: Path, rank: int, process: int) -> bool:
    """Whether this process of a rank was ended by the interpreter's own watchdog."""
    lines = lines_of(folder, rank) or [""]
    return lines[0].startswith(f"process {process} on ") and is_blocked(lines)


def is_blocked(lines: list[str]) -> bool:
    """Whether these lines of a rank are by the interpreter's own watchdog."""
    return any(line.startswith(BLOCKED) for line in lines)


def hang_report(folder: Path, ranks: int, seconds: float) -> str:
    """Where each rank stands, in lines, by what the ranks left in `folder`."""
    head = f"error: no step for guards.hang_seconds = {seconds:g} s; stacks are in {folder}:"
    words = [word_of(folder, rank) or silence_of(folder, rank) for rank in range(ranks)]
    return "\n  ".join([head, *words])


def silence_of(folder: Path, rank: int) -> str:
    """What is known of a rank that wrote no word."""
    lines = lines_of(folder, rank)
    innermost = [
        line.strip() for before, line in zip(lines, lines[1:]) if "most recent call first" in before
    ]
    if is_blocked(lines) and innermost:  # the main thread comes last
        return f"rank {rank}: blocked outside Python in {innermost[-1]}"
    process = lines[0] if lines else "its process"
    return f"rank {rank}: no word; {process} is stopped, dead or blocked outside Python"


def where(frame: Any, recorded: list[dict[str, Any]]) -> str:
    """Where a thread stands, in words: the collective it waits in, if it does, and the line of this package that called it.

    On NCCL, whose collectives run beside the host, it is the first of those `recorded` that has not completed. gloo records beginnings
    only: there it is the last one, if the thread is inside torch.distributed.
    """
    stack = traceback.extract_stack(frame)
    inner, own = (
        stack[-1],
        next((entry for entry in reversed(stack) if entry.filename.startswith(PACKAGE)), stack[0]),
    )
    pending = [
        entry
        for entry in recorded
        if entry["profiling_name"].startswith("nccl:") and entry["state"] != "completed"
    ]
    if not pending and any(
        f"torch{os.sep}distributed" in entry.filename for entry in stack[stack.index(own) + 1 :]
    ):
        pending = recorded[-1:]
    if pending:
        place = f"waiting in the collective {name_of(pending[0])}"
    else:
        place = f"in {inner.name} ({inner.filename}:{inner.lineno}), in no collective" + (
            f"; the last was {name_of(recorded[-1])}" if recorded else ""
        )
    return f"{place}; called from {own.name} ({Path(own.filename).name}:{own.lineno})"


def name_of(entry: dict[str, Any]) -> str:
    """A collective in words."""
    return f"{entry['profiling_name']} number {entry['collective_seq_id']} of group {entry['process_group'][0]}, sizes {entry['input_sizes']}"
