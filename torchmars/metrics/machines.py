"""Which machines an elastic run had before its ranks started again, as its own files tell."""

import contextlib
import time
from dataclasses import dataclass
from pathlib import Path

from torchmars.core.errors import UserError
from torchmars.metrics.events import EVENTS_FILE, EventLog, read_events
from torchmars.metrics.journal import METRICS_FILE, last_step


@dataclass(frozen=True)
class MachinesBefore:
    """The machines of the last start, and how far the run was with them."""

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
        return {
            "count": len(names),
            "left": len(left),
            "joined": len(joined),
            "seconds": self.seconds,
            "steps_again": again,
        }


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
