"""Traces of steps, and snapshots of memory, for a closer look at a run."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch.profiler import profile, record_function, schedule

from torchmars.config import ProfilerConfig
from torchmars.core.console import labelled, say
from torchmars.core.device import is_gpu
from torchmars.parallel.layout import Layout

MOST_EVENTS = 100_000  # of allocating and freeing that a snapshot has, the last ones


class Profiler:
    """Makes the records of `config` on each rank, in files of `folder`; a context of the training.

    A file that cannot be written is worth a warning only.
    """

    def __init__(self, config: ProfilerConfig, folder: Path, layout: Layout) -> None:
        self.config, self.folder, self.rank = config, folder, layout.world.rank
        self.trace: profile | None = None
        self.device_module = torch.get_device_module(layout.device)
        self.records_memory = config.memory and is_gpu(layout.device.type)

    def __enter__(self) -> "Profiler":
        if self.records_memory:
            # Private, torch 2.11 to 2.15, but described in torch's own pages on GPU memory.
            self.device_module.memory._record_memory_history(max_entries=MOST_EVENTS)
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if self.records_memory:
            if isinstance(error, torch.OutOfMemoryError):  # its allocations still exist
                self._write(
                    "memory-out-of-memory", "pickle", self.device_module.memory._dump_snapshot
                )
            self.device_module.memory._record_memory_history(enabled=None)
        self._end_trace()

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Record the body, step `number`, if it is to be recorded."""
        start, steps = self.config.start, self.config.steps
        # From one step before: torch.profiler takes its time to begin.
        if start and self.trace is None and start - 1 <= number <= start:
            phases = schedule(wait=0, warmup=start - number, active=steps, repeat=1)
            self.trace = profile(schedule=phases, on_trace_ready=self._write_trace)
            self.trace.start()
        with record_function(f"step {number}") if self.trace else contextlib.nullcontext():
            yield
        if self.trace is not None:
            self.trace.step()
            if number >= start + steps - 1:
                self._end_trace()

    def _end_trace(self) -> None:
        """End the trace, which is written if it has steps that are not."""
        if self.trace is not None:
            trace, self.trace = self.trace, None
            trace.stop()

    def _write_trace(self, trace: profile) -> None:
        start, last = self.config.start, self.config.start + self.config.steps - 1
        self._write(f"steps-{start}-to-{last}", "json.gz", trace.export_chrome_trace)

    def _write(self, name: str, suffix: str, write: Callable[[str], None]) -> None:
        """Write a file, and name it in the log."""
        file = self.folder / f"{name}-rank-{self.rank}.{suffix}"
        text = str(file)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            file.unlink(missing_ok=True)  # it may be a link
            write(str(file))
        except (OSError, RuntimeError) as error:
            text = f"cannot write {file}: {error}"
        say(*labelled("profile", text))
