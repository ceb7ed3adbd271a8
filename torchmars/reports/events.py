"""What happened to a run, in words."""

from typing import Any

from torchmars.records.events import Event
from torchmars.records.lines import is_number
from torchmars.records.run import Run

ENDS = ("stopped", "complete", "failed")


def told(run: Run) -> list[tuple[Event, str]]:
    """Return what happened to a run except its samples, oldest first, each with its words."""
    events = [event for event in run.events if event.kind != "sample"]
    return [(each, event_words(each, before)) for before, each in zip([None, *events], events)]


def event_words(event: Event, before: Event | None) -> str:
    """Return what an event says beside its kind and step. `before` is the one before it."""
    facts = event.facts
    match event.kind:
        case "started":
            killed = before is not None and before.kind not in (*ENDS, "left", "joined")
            return ", ".join(["the run was killed before"] * killed + started(facts))
        case "saved":
            size, seconds = decimal(facts.get("mib"), 1), decimal(facts.get("seconds"), 2)
            return f"{facts.get('checkpoint')}: {size} MiB in {seconds} s"
        case "left" | "joined":
            seconds, again = decimal(facts.get("seconds"), 1), facts.get("steps_again")
            return f"{facts.get('machine')}: {seconds} s without a step, {again} made again"
        case "spike":
            return f"loss {decimal(facts.get('loss'), 4)}, its step is left out"
        case "stopped":
            return f"by {facts.get('signal') or 'a signal to another rank'}"
    facts = {name: value for name, value in facts.items() if value not in (None, "")}
    return ", ".join(f"{name} {value}" for name, value in facts.items()).removeprefix("message ")


def started(facts: dict[str, Any]) -> list[str]:
    """Return what the event of a start says."""
    parts = [str(facts["origin"])] if facts.get("origin") else []
    for name in ("ranks", "machines"):
        if isinstance(count := facts.get(name), int):
            parts.append(f"{count} {name}" if count != 1 else f"1 {name[:-1]}")
    changes = facts.get("changes") or []
    return parts + [str(each) for each in (changes if isinstance(changes, list) else [changes])]


def decimal(value: Any, digits: int) -> str:
    """Return a number that an event gives; a question mark if it is none."""
    return f"{value:,.{digits}f}" if is_number(value) else "?"
