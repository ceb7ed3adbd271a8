"""events.jsonl: the events of a run, a line each; unlike metrics.jsonl it is never rewound."""

import contextlib
import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from types import NoneType
from typing import Any, Literal

from torchmars.core.console import say
from torchmars.core.files import is_gone, open_to_write
from torchmars.metrics.lines import Lines, Row, check_types, read_lines

EVENTS_FILE = "events.jsonl"

# The events of a run; docs/watching.md has the facts of each. A run whose processes were all killed
# has no event of its end, and starts again.
Kind = Literal[
    "started",
    "left",
    "joined",
    "saved",
    "spike",
    "sample",
    "stopped",
    "complete",
    "failed",
    "deleted",
]
# The types of events' facts. Facts that a later version adds are shown as they are.
NUMBER: tuple[type, ...] = (float, int)
FACTS: dict[str, tuple[type, ...]] = {
    "time": NUMBER,
    "event": (str,),
    "ranks": (int,),
    "machines": (int,),
    "changes": (list,),
    "names": (list,),
    "meeting": (str,),
    "machine": (str,),
    "steps_again": (int,),
    "checkpoint": (str,),
    "seconds": NUMBER,
    "mib": NUMBER,
    "loss": NUMBER,
    "text": (str,),
}
OTHER_FACTS = (str, float, int, bool, NoneType, list)
END_OF_TIME = 253402214400.0  # the last day of the year 9999, with which calendars end


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
    """The facts of this kind, by name."""


class EventLog:
    """Adds to the events of a run. Nothing that goes wrong with its file disturbs the run."""

    def __init__(self, folder: Path | None) -> None:
        """`folder` is the run's; None on all ranks except the first, which alone writes."""
        self.file = folder and folder / EVENTS_FILE
        self.began = self.file is not None and self.file.exists()

    def add(self, kind: Kind, step: int, **facts: Any) -> None:
        """Add an event of now, after `step`. If the disk refuses it, it is left out."""
        if self.file is None:
            return
        if self.began and is_gone(self.file):
            self.began = False  # and begins again
            self.deleted(step, self.file)
        row = {"time": time.time(), "event": kind, "step": step} | facts
        line = json.dumps(row).encode() + b"\n"
        with contextlib.suppress(OSError):
            descriptor = open_to_write(self.file, os.O_RDWR | os.O_APPEND)
            try:
                size = os.fstat(descriptor).st_size
                if size and os.pread(descriptor, 1, size - 1) != b"\n":
                    line = b"\n" + line  # a crash or a full disk has cut the line before short
                os.write(descriptor, line)
                self.began = True
            finally:
                os.close(descriptor)

    def deleted(self, step: int, path: PurePath) -> None:
        """Say that a file or folder of the run was deleted before `step`, and add the event.

        Of a run folder that is gone itself nothing is said: that ends the run.
        """
        if not is_gone(path.parent):
            say(
                f"warning: {path} was deleted or moved while the run went on, and starts over",
                error=True,
            )
            self.add("deleted", step, what=path.name)


def read_events(file: Path) -> Lines[Event]:
    """Return the events in a file, oldest first. Raises `UserError` if it cannot be read."""
    return read_lines(file, event_of)


def event_of(row: Row) -> Event:
    """Return the event that a line tells. Raises `ValueError` for any other line."""
    check_types(row, FACTS, OTHER_FACTS)
    if not {"time", "event"} <= set(row) or not 0 <= row["time"] <= END_OF_TIME:
        raise ValueError("it has no time, or is no event")
    kind, step, seconds = row.pop("event"), row.pop("step"), row.pop("time")
    return Event(kind, step, float(seconds), row)
