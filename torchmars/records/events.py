"""events.jsonl: the events of a run, a line each; unlike metrics.jsonl it is never rewound.

A run whose processes were all killed has no event of its end, and starts again.
"""

import contextlib
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchmars.core.errors import UserError
from torchmars.records.lines import METRICS_FILE, Journal, Lines, Row, last_step, read_lines

EVENTS_FILE = "events.jsonl"

# The seconds of the year 9999, after which Python knows no date.
LAST_TIME = 253_402_214_400


@dataclass(frozen=True)
class Event:
    """Something that happened to a run."""

    kind: str
    """Which one: docs/watching.md has all, and the facts of each."""
    step: int
    """After which step."""
    time: float
    """When, in seconds since 1970."""
    facts: dict[str, Any] = field(default_factory=dict)
    """The facts of this kind, by name."""


class EventLog:
    """Adds to the events of a run."""

    def __init__(self, folder: Path | None) -> None:
        """`folder` is the run's; None on all ranks except the first, which alone writes."""
        self.journal = None if folder is None else Journal(folder / EVENTS_FILE)

    def add(self, kind: str, step: int, **facts: Any) -> None:
        """Add an event of now, after `step`. If the disk refuses it, it is left out."""
        if self.journal is not None:
            self.journal.write({"time": time.time(), "event": kind, "step": step} | facts)


def read_events(file: Path) -> Lines[Event]:
    """Return the events in a file, oldest first. Raises `UserError` if it cannot be read."""
    return read_lines(file, event_of)


def event_of(row: Row) -> Event:
    """Return the event that a line tells. Raises for any other line."""
    kind, step, moment = str(row.pop("event")), int(row.pop("step")), float(row.pop("time"))
    if not 0 <= moment < LAST_TIME:
        raise ValueError("its time is in no calendar")
    return Event(kind, step, moment, row)


@dataclass(frozen=True)
class MachinesBefore:
    """The machines of an elastic run at its last start, and how far the run was with them."""

    meeting: str
    """The name of their meeting, which others have joined or left since."""
    names: frozenset[str]
    reached: int
    """The last step that they have reported."""
    seconds: float
    """How long ago that was."""

    def add_changes(self, events: EventLog, step: int, names: frozenset[str]) -> dict[str, float]:
        """Add an event for each machine that has left or joined before the start after `step`.

        Returns the same as numbers, by name.
        """
        again = max(0, self.reached - step)
        left, joined = sorted(self.names - names), sorted(names - self.names)
        facts = {"seconds": self.seconds, "steps_again": again}
        for name in left:
            events.add("left", step, machine=name, **facts)
        for name in joined:
            events.add("joined", step, machine=name, **facts)
        return {"count": len(names), "left": len(left), "joined": len(joined)} | facts


def machines_before(folder: Path) -> MachinesBefore | None:
    """Return the machines of the last start of the run in `folder`; None for its first start."""
    with contextlib.suppress(UserError, OSError):
        starts = [each for each in read_events(folder / EVENTS_FILE) if each.kind == "started"]
        file = folder / METRICS_FILE
        reached, written = last_step(file), file.stat().st_mtime
        if starts and isinstance(names := starts[-1].facts.get("names"), list):
            meeting = str(starts[-1].facts.get("meeting"))
            seconds = max(0.0, time.time() - written)
            return MachinesBefore(meeting, frozenset(map(str, names)), reached, seconds)
    return None
