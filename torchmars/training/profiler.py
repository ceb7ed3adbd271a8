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
        self.config, self.folder, self.layout = config, folder, layout
        self.last = config.start + config.steps - 1  # step of the trace
        self.trace: profile | None = None
        self.has_stepped = False
        self.device_module = torch.get_device_module(layout.device)
        self.records_memory = config.memory and is_gpu(layout.device.type)

    def __enter__(self) -> "Profiler":
        if self.records_memory:
            # Private, torch 2.11 to 2.15, but described in torch's own pages on GPU memory.
            self.device_module.memory._record_memory_history(max_entries=MOST_EVENTS)
        elif self.config.memory:
            self._say("no snapshots of memory: profiler.memory records GPUs only")
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if self.records_memory:
            if isinstance(error, torch.OutOfMemoryError):  # its allocations still exist
                write = self.device_module.memory._dump_snapshot
                self._write("memory-out-of-memory", "pickle", write, everywhere=False)
            self.device_module.memory._record_memory_history(enabled=None)
        self._end_trace()

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Record the body, step `number`, if it is to be recorded."""
        if self.config.start and not self.has_stepped and number > self.config.start:
            self._say(
                f"no trace: this run continues with step {number}, after profiler.start = "
                f"{self.config.start}"
            )
        self.has_stepped = True
        # From one step before: torch.profiler takes its time to begin.
        if self.config.start and self.config.start - 1 <= number <= self.config.start:
            self._begin_trace(number)
        with record_function(f"step {number}") if self.trace else contextlib.nullcontext():
            yield
        if self.trace is not None:
            self.trace.step()
            if number >= self.last:
                self._end_trace()

    def _begin_trace(self, number: int) -> None:
        """Begin to trace with step `number`, if the trace has not begun."""
        if self.trace is not None:
            return
        warmup, steps = self.config.start - number, self.config.steps
        phases = schedule(wait=0, warmup=warmup, active=steps, repeat=1)
        self.trace = profile(schedule=phases, on_trace_ready=self._write_trace)
        self.trace.start()

    def _end_trace(self) -> None:
        """End the trace, which is written if it has steps that are not."""
        if self.trace is not None:
            trace, self.trace = self.trace, None
            trace.stop()

    def _write_trace(self, trace: profile) -> None:
        name = f"steps-{self.config.start}-to-{self.last}"
        self._write(name, "json.gz", trace.export_chrome_trace, everywhere=True)

    def _write(
        self, name: str, suffix: str, write: Callable[[str], None], everywhere: bool
    ) -> None:
        """Write a file, and name it in the log. `everywhere`: every rank writes one."""
        file = self.folder / f"{name}-rank-{self.layout.world.rank}.{suffix}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            file.unlink(missing_ok=True)  # it may be a link
            write(str(file))
        except (OSError, RuntimeError) as error:
            self._say(f"cannot write {file}: {error}", by_all=True)
        else:
            of_all = self.folder / f"{name}-rank-*.{suffix}"
            self._say(str(of_all if everywhere else file), by_all=not everywhere)

    def _say(self, text: str, by_all: bool = False) -> None:
        if by_all or self.layout.first:
            say("\n".join(labelled("profile", text)))
