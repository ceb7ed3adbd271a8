"""What the files of an elastic run tell of its machines at its next start."""

import json
import os
import time

from torchmars.records.events import EVENTS_FILE, EventLog, machines_before, read_events
from torchmars.records.lines import METRICS_FILE


def test_who_has_left_and_joined_is_an_event_each(tmp_path, monkeypatch):
    assert machines_before(tmp_path) is None  # a new run
    events = EventLog(tmp_path)
    events.add("started", 0, ranks=2, names=["a", "b"], meeting="first")
    events.add("saved", 5, checkpoint="step-00000005")
    rows = [{"step": step, "train/loss": 1.0} for step in range(1, 10)]
    (tmp_path / METRICS_FILE).write_text("".join(json.dumps(row) + "\n" for row in rows))
    os.utime(tmp_path / METRICS_FILE, (1_000_000, 1_000_000))
    monkeypatch.setattr(time, "time", lambda: 1_000_030.5)
    before = machines_before(tmp_path)
    assert (before.meeting, before.names, before.reached) == ("first", {"a", "b"}, 9)
    assert before.seconds == 30.5
    values = before.add_changes(events, 7, frozenset({"b", "c", "d"}))
    assert values.pop("seconds") == before.seconds
    assert values == {"count": 3, "left": 1, "joined": 2, "steps_again": 2}
    told = [event for event in read_events(tmp_path / EVENTS_FILE) if event.step == 7]
    assert [(each.kind, each.facts["machine"]) for each in told] == [
        ("left", "a"),
        ("joined", "c"),
        ("joined", "d"),
    ]


def test_a_run_of_fixed_machines_has_none(tmp_path):
    EventLog(tmp_path).add("started", 0, ranks=2)
    (tmp_path / METRICS_FILE).write_text('{"step": 1}\n')
    assert machines_before(tmp_path) is None
