"""events.jsonl: what happened to a run, a line each; unlike metrics.jsonl it is never rewound."""

import contextlib
import json
import math
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

EVENTS_FILE = "events.jsonl"

# What happens to a run, and the facts that each event has beside its step:
#   started   ranks, machines, origin (None for a new run), changes of the config
#   saved     checkpoint, seconds, mib
#   spike     loss, action (skip or rollback)
#   rollback  from_step, checkpoint
#   sample    text
#   stopped   signal
#   complete
#   failed    message, whose last line says what; of a crash also rank, machine, code
# A run whose processes were all killed has no event of its end, and starts again.
Kind = Literal["started", "saved", "spike", "rollback", "sample", "stopped", "complete", "failed"]


@dataclass(frozen=True)
class Event:
    """Something that happened to a run."""

    kind: str
    """Which `Kind`. An event of a later version may be of another one."""
    step: int
    """After which step."""
    time: float
    """When, in seconds since 1970."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What belongs to this kind, by name."""


class EventLog:
    """Adds to the events of a run. Nothing that goes wrong with its file disturbs the run."""

    def __init__(self, folder: Path | None) -> None:
        """`folder` is that of the run; None on all ranks but the first, which alone writes."""
        self.file = folder and folder / EVENTS_FILE

    def add(self, kind: Kind, step: int, **facts: Any) -> None:
        """Add an event of now, after `step`. What the disk refuses is left out."""
        if self.file is None:
            return
        row = {"time": time.time(), "event": kind, "step": step} | facts
        line = json.dumps(row).encode() + b"\n"
        with contextlib.suppress(OSError):
            descriptor = os.open(self.file, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
            try:
                size = os.fstat(descriptor).st_size
                if size and os.pread(descriptor, 1, size - 1) != b"\n":
                    line = b"\n" + line  # a crash or a full disk has cut the line before short
                os.write(descriptor, line)
            finally:
                os.close(descriptor)


def read_events(file: Path) -> list[Event]:
    """Return the events in a file, oldest first, without a line that a crash cut short."""
    events = []
    with contextlib.suppress(OSError):
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
            with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
                row = json.loads(line)
                time_of, kind, step = row.pop("time"), row.pop("event"), row.pop("step")
                if math.isfinite(time_of) and math.isfinite(step):
                    events.append(Event(str(kind), int(step), float(time_of), row))
    return events
