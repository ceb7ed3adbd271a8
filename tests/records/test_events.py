"""The events of a run: written whatever the disk does, read whatever a crash left."""

from torchmars.records.events import EVENTS_FILE, EventLog, read_events


def test_events_are_read_as_they_were_written(tmp_path):
    log = EventLog(tmp_path)
    log.add("started", 0, ranks=2, origin=None)
    log.add("sample", 5, text="two\nlines, and \u2028 \ud800 no letters")
    first, second = read_events(tmp_path / EVENTS_FILE)
    assert (first.kind, first.step, first.facts) == ("started", 0, {"ranks": 2, "origin": None})
    assert second.facts == {"text": "two\nlines, and \u2028 \ud800 no letters"}
    assert 0 < first.time <= second.time


def test_a_line_that_was_cut_short_costs_no_other(tmp_path):
    file = tmp_path / EVENTS_FILE
    EventLog(tmp_path).add("started", 0)
    whole = file.read_bytes()
    for end in range(len(whole) - 2):
        file.write_bytes(whole + whole[:end])
        EventLog(tmp_path).add("saved", 7)
        assert [event.kind for event in read_events(file)] == ["started", "saved"]


def test_a_file_that_cannot_be_written_disturbs_nobody(tmp_path):
    EventLog(None).add("started", 0)
    EventLog(tmp_path / "none").add("started", 0)
    (tmp_path / EVENTS_FILE).mkdir()
    EventLog(tmp_path).add("started", 0)
    assert [path.name for path in tmp_path.iterdir()] == [EVENTS_FILE]
