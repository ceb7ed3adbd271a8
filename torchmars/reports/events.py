"""What happened to a run, in words."""

import time
from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from torchmars.metrics.events import Event
from torchmars.records.run import Run

ENDS = ("stopped", "complete", "failed")


@dataclass(frozen=True)
class Entry:
    """An event of a run, in words."""

    run: str
    kind: str
    """As of an `Event`, or skipped: steps that the optimizer skipped."""
    step: int
    seconds: float | None
    """Since 1970; None where only the step is known."""
    text: str
    from_step: int | None = None
    """The step that a rollback went back from."""

    @property
    def time(self) -> str:
        """When it was, in local time."""
        if self.seconds is None:
            return ""
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.seconds))

    def json(self) -> dict[str, Any]:
        """Return the event as the page's scripts read it."""
        facts = {"kind": self.kind, "step": self.step, "time": self.seconds, "text": self.text}
        return facts | ({} if self.from_step is None else {"from": self.from_step})


def entries_of(run: Run, name: str) -> list[Entry]:
    """Return what happened to a run, which is called `name`, but for its samples; oldest first.

    Skipped steps are from its metrics. They have no time, and come after the events of their step.
    """
    events = [event for event in run.events if event.kind != "sample"]
    found = [
        Entry(name, each.kind, each.step, each.time, words(each, before), from_step(each))
        for before, each in zip([None, *events], events)
    ]
    # The first event of a later step is the first at which the highest step so far is later.
    highest = list(accumulate((each.step for each in found), max))
    placed = [(bisect_right(highest, each.step), 0, each) for each in skips(run, name)]
    placed += [(number, 1, each) for number, each in enumerate(found)]
    return [each for *_, each in sorted(placed, key=lambda place: place[:2])]


def some_of(entries: list[Entry], most: int) -> list[Entry]:
    """Return entries in their order, of each kind at most `most`, evenly spaced."""
    places: dict[str, list[int]] = {}
    for number, each in enumerate(entries):
        places.setdefault(each.kind, []).append(number)
    kept = {
        of_kind[place]
        for of_kind in places.values()
        for place in np.linspace(0, len(of_kind) - 1, min(most, len(of_kind))).astype(int)
    }
    return [entries[number] for number in sorted(kept)]


def words(event: Event, before: Event | None) -> str:
    """Return what an event says beside its kind and step. `before` is the one before it."""
    facts = event.facts
    match event.kind:
        case "started":
            return ", ".join(started(facts, before))
        case "saved":
            size, seconds = decimal(facts.get("mib"), 1), decimal(facts.get("seconds"), 2)
            return f"{facts.get('checkpoint')}: {size} MiB in {seconds} s"
        case "spike":
            done = {"skip": "its step is left out", "rollback": "the run goes back"}
            action = done.get(str(facts.get("action")), "")
            return f"loss {decimal(facts.get('loss'), 4)}, {action}".rstrip(", ")
        case "rollback":
            return f"back from step {facts.get('from_step')} to {facts.get('checkpoint')}"
        case "stopped":
            return f"by {facts.get('signal') or 'a signal to another rank'}"
    told = [f"{name} {value}" for name, value in facts.items() if value not in (None, "")]
    return ", ".join(told).removeprefix("message ")


def started(facts: dict[str, Any], before: Event | None) -> list[str]:
    """Return what the event of a start says."""
    parts = []
    if before is not None and before.kind not in ENDS:
        parts.append("the run was killed before")
    if facts.get("origin"):
        parts.append(str(facts["origin"]))
    for name in ("ranks", "machines"):
        if isinstance(count := facts.get(name), int):
            parts.append(f"{count} {name}" if count != 1 else f"1 {name[:-1]}")
    changes = facts.get("changes")
    if isinstance(changes, list):
        parts += map(str, changes)
    elif changes:
        parts.append(str(changes))
    return parts


def from_step(event: Event) -> int | None:
    """Return the step that a rollback went back from; None for other events."""
    reached = event.facts.get("from_step")
    return reached if event.kind == "rollback" and isinstance(reached, int) else None


def skips(run: Run, name: str) -> list[Entry]:
    """Return where the optimizer skipped steps, as far as reports tell."""
    return [
        Entry(name, "skipped", step, None, f"{count:.0f} since the report before")
        for step, count in zip(run.skipped.steps.tolist(), run.skipped.values)
    ]


def samples_of(run: Run) -> list[tuple[int, str]]:
    """Return what the model has written, with the step after which it did, the newest first."""
    samples = [event for event in run.events if event.kind == "sample"]
    return [(each.step, str(each.facts.get("text", ""))) for each in reversed(samples)]


def decimal(value: Any, digits: int) -> str:
    """Return a number that an event gives; a question mark if it is none."""
    return f"{value:,.{digits}f}" if isinstance(value, int | float) else "?"
