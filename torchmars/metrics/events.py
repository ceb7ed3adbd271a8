"""events.jsonl: what happened to a run, a line each; unlike metrics.jsonl it is never rewound."""

import contextlib
import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

EVENTS_FILE = "events.jsonl"


@dataclass(frozen=True)
class Event:
    """Something that happened to a run."""

    kind: str
    """What: started, saved, spike, rollback, sample, stopped, complete."""
    step: int
    """After which step."""
    time: float
    """When, in seconds since 1970."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What belongs to this kind, by name."""


def append_event(folder: Path, kind: str, step: int, **facts: Any) -> None:
    """Add an event of now to the run in `folder`. What the disk refuses is left out."""
    line = json.dumps({"time": time.time(), "event": kind, "step": step} | facts) + "\n"
    with contextlib.suppress(OSError):
        descriptor = os.open(folder / EVENTS_FILE, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            os.write(descriptor, line.encode())
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
                events.append(Event(str(kind), int(step), float(time_of), row))
    return events
