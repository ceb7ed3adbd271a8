"""The watchdog: it ends a rank that hangs, and leaves its stacks."""

import faulthandler
import os
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

import torch._C._distributed_c10d as c10d
import torch.distributed as dist

from torchmars.cluster import process
from torchmars.cluster.failures import report_file
from torchmars.core.console import say
from torchmars.core.errors import file_errors
from torchmars.core.files import open_to_write
from torchmars.parallel.layout import Layout

GRACE_SECONDS = 5.0  # for the flight recorder's dump, which may block, before the end


class Watchdog:
    """Ends the process soon after `seconds` have passed since its last heartbeat.

    `with Watchdog(...) as watchdog:`, and `watchdog.beat()` from time to time. Before the end each
    rank writes its stacks to `folder`/rank-00000.txt, and what torch's flight recorder has of
    collectives to `folder`/flight_0, which `torchfrtrace` reads. The interpreter's own watchdog,
    which needs no thread of Python, ends the process. 0 seconds: it watches nothing.
    """

    def __init__(self, folder: Path, layout: Layout, seconds: float) -> None:
        self.folder, self.layout, self.seconds = folder, layout, seconds
        self.on_nccl = dist.get_default_backend_for_device(layout.device.type) == "nccl"
        self.file = report_file(folder, layout.world.rank)
        self.flight = folder / f"flight_{layout.world.rank}"
        self.stream: TextIO | None = None  # of `file`, while it watches
        self.thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self.ended = threading.Event()

    def __enter__(self) -> "Watchdog":
        if self.seconds:
            self.layout.on_all(self._open)
            self.beat("the first step")
            self.thread.start()
        return self

    def __exit__(self, *exception: Any) -> None:
        if self.stream is not None:
            self.ended.set()
            self.thread.join()
            faulthandler.cancel_dump_traceback_later()
            self.stream.close()
            if exception[0] and time.monotonic() - self.last_beat > self.seconds:
                return  # the end of another rank that hung has ended this one's wait for it
            self.file.unlink(missing_ok=True)
            with suppress(OSError):  # the last rank deletes the folder
                self.folder.rmdir()

    def beat(self, activity: str) -> None:
        """Make a heartbeat: this rank does not hang, and `activity` comes next."""
        self.activity, self.last_beat = activity, time.monotonic()
        if self.stream is not None:
            end = self.seconds + GRACE_SECONDS
            faulthandler.dump_traceback_later(end, exit=True, file=self.stream)

    def _open(self) -> None:
        """Open the file now: when a rank hangs may be too late."""
        remedy = "make room, or set run.folder to a folder you can write"
        with file_errors(f"cannot write to {self.folder}", remedy):
            self.folder.mkdir(parents=True, exist_ok=True)
            self.flight.unlink(missing_ok=True)
            self.stream = open(self.file, "w", opener=open_to_write)
            print(f"process {os.getpid()} on {process.node()}", file=self.stream, flush=True)

    def _watch(self) -> None:
        while not self.ended.wait(min(1.0, self.seconds / 4)):
            if time.monotonic() - self.last_beat > self.seconds:
                say(
                    f"error: rank {self.layout.world.rank} has been in {self.activity} for "
                    f"guards.hang_seconds = {self.seconds:g} s: its stacks will be in {self.file}",
                    error=True,
                )
                assert self.stream is not None
                faulthandler.dump_traceback(self.stream)
                # Private API, torch 2.11 to 2.15, which torch's stubs leave out.
                dump = getattr(c10d, "_dump_nccl_trace" if self.on_nccl else "_dump_fr_trace")
                with suppress(OSError), open(self.flight, "wb", opener=open_to_write) as to:
                    to.write(dump())
                return
