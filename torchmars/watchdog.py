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

from torchmars.console import say
from torchmars.errors import EXIT_HUNG, UserError
from torchmars.parallel.mesh import Layout

PACKAGE = str(Path(__file__).parent)
GRACE_SECONDS = 5.0  # for the other ranks to notice too


class Watchdog:
    """`with Watchdog(...) as watchdog:` ends the process with code 70 once `seconds` have passed since the last `watchdog.beat`.

    Before that, each rank writes the stacks of its threads to `folder`/rank-00000.txt and what torch's flight recorder has of collectives to
    `folder`/flight_0, which `torchfrtrace` reads; the first rank prints a line for each rank. 0 seconds: it watches nothing.
    """

    def __init__(self, folder: Path, layout: Layout, seconds: float, aside: str) -> None:
        """`aside` names a process group whose collectives are another thread's: a save's."""
        self.folder, self.layout, self.seconds, self.aside = folder, layout, seconds, aside
        self.file = self._file(layout.rank)
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
        except OSError as error:
            raise UserError(f"cannot write to {self.folder}: {error.strerror}: make room, or set run.folder to a folder you can write") from None

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
        """Where not even the watching thread gets its turn, the interpreter's own watchdog writes the stacks and ends the process with 1."""
        faulthandler.dump_traceback_later(self.seconds + GRACE_SECONDS, exit=True, file=self.stream)

    def _report(self) -> None:
        main = sys._current_frames()[threading.main_thread().ident]
        mine = f"rank {self.layout.rank}: {time.monotonic() - self.at:.0f} s in {self.doing}: {where(main, self._recorded())}"
        with contextlib.suppress(OSError):
            print(mine, file=self.stream, flush=True)
            faulthandler.dump_traceback(self.stream)
            self._flight().write_bytes((c10d._dump_nccl_trace if self.on_gpu else c10d._dump_fr_trace)())
        if not self.layout.first:
            time.sleep(2 * GRACE_SECONDS)  # the first rank must have read and printed before the launcher sees a rank end
            return
        time.sleep(GRACE_SECONDS)
        say(f"error: no step for guards.hang_seconds = {self.seconds:g} s; stacks are in {self.folder}:", error=True)
        for rank in range(self.layout.size):
            say(f"  {mine if rank == self.layout.rank else self._word_of(rank)}", error=True)

    def _word_of(self, rank: int) -> str:
        """What another rank wrote of itself."""
        with contextlib.suppress(OSError, IndexError):
            return self._file(rank).read_text().splitlines()[0]
        return f"rank {rank}: no word; it is dead or blocked outside Python"

    def _recorded(self) -> list[dict[str, Any]]:
        """The collectives of this rank, without those of the save thread, by torch's flight recorder (private API, torch 2.11 to 2.13)."""
        dump = c10d._dump_nccl_trace_json(includeCollectives=True, onlyActive=False) if self.on_gpu else \
            c10d._dump_fr_trace_json(includeCollectives=True, onlyActive=False)
        return [entry for entry in json.loads(dump).get("entries", []) if entry["process_group"][0] != self.aside]

    def _file(self, rank: int) -> Path:
        return self.folder / f"rank-{rank:05d}.txt"

    def _flight(self) -> Path:
        return self.folder / f"flight_{self.layout.rank}"


def where(frame: Any, recorded: list[dict[str, Any]]) -> str:
    """Where a thread stands, in words: the collective it waits in, if it does, and the line of this package that called it.

    On NCCL, whose collectives run beside the host, it is the first of those `recorded` that has not completed. gloo records beginnings
    only: there it is the last one, if the thread is inside torch.distributed.
    """
    stack = traceback.extract_stack(frame)
    inner, own = stack[-1], next((entry for entry in reversed(stack) if entry.filename.startswith(PACKAGE)), stack[0])
    pending = [entry for entry in recorded if entry["profiling_name"].startswith("nccl:") and entry["state"] != "completed"]
    if not pending and any(f"torch{os.sep}distributed" in entry.filename for entry in stack[stack.index(own) + 1:]):
        pending = recorded[-1:]
    if pending:
        place = f"waiting in the collective {name_of(pending[0])}"
    else:
        place = f"in {inner.name} ({inner.filename}:{inner.lineno}), in no collective" + (f"; the last was {name_of(recorded[-1])}" if recorded else "")
    return f"{place}; called from {own.name} ({Path(own.filename).name}:{own.lineno})"


def name_of(entry: dict[str, Any]) -> str:
    """A collective in words."""
    return f"{entry['profiling_name']} number {entry['collective_seq_id']} of group {entry['process_group'][0]}, sizes {entry['input_sizes']}"
