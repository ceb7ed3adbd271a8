"""Damaged files of runs: what is good is read, what is left out is counted and said."""

import json
import math

import pytest

from tests.support.records import made_run
from torchmars.records.events import EVENTS_FILE, read_events
from torchmars.records.lines import Journal
from torchmars.records.run import read_run

METRICS = [
    '{"step": "7", "train/loss": 1}',
    '{"train/loss": 1}',
    '{"step": 7, "train/loss": [[1]]}',
    '{"step": 7, "train/loss": "x"}',
    '{"step": 7, "train/loss": ' + "[" * 5000 + "]" * 5000 + "}",
    '{"step": 99999999999999999999, "train/loss": 1}',
    '{"step": 7, "train/loss": 1' + "0" * 400 + "}",
    '{"step": -1, "train/loss": 1}',
    '{"step": 7, "train/loss": true}',
    '"step"',
    '{"step": 7, "train/lo',
    "\x00",
]
EVENTS = [
    '{"time": 1.8e9, "event": "saved", "step": null}',
    '{"time": "x", "event": "saved", "step": 7}',
    '{"event": "saved", "step": 7}',
    '{"time": 1.8e9, "step": 7}',
    '{"time": 1.8e9, "event": "saved", "step": Infinity}',
    '{"time": 1e300, "event": "saved", "step": 7}',
    '{"time": NaN, "event": "saved", "step": 7}',
    "[1]",
]
HALF = {"time": 1.8e9, "event": "half \ud800", "step": 8, "text": "\udfff"}


def text(lines):
    return "".join(line + "\n" for line in lines)


@pytest.mark.parametrize("line", METRICS)
def test_a_damaged_line_of_metrics_costs_no_other(tmp_path, line, capsys):
    folder = made_run(tmp_path / "run", 3)
    file = folder / "metrics.jsonl"
    good = file.read_text()
    file.write_text(good + text([line]))
    run = read_run(folder)
    assert run.damaged == 1 and run.series["train/loss"].steps.tolist() == [1, 2, 3]
    assert run.last_step == 3
    Journal(file).rewind(2, True)
    assert [json.loads(each)["step"] for each in file.read_text().splitlines()] == [1, 1, 2, 2]
    assert capsys.readouterr().err == f"warning: {file}: 1 damaged line is left out\n"


@pytest.mark.parametrize("line", EVENTS)
def test_a_damaged_line_of_events_costs_no_other(tmp_path, line):
    file = tmp_path / EVENTS_FILE
    file.write_text(text([line, json.dumps(HALF)]))
    events = read_events(file)
    assert events.damaged == 1 and [each.kind for each in events] == ["half \ud800"]


def test_commands_say_what_they_leave_out(tmp_path, call, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = made_run(tmp_path / "run", 3)
    for name, lines in (("metrics.jsonl", METRICS), ("events.jsonl", [*EVENTS, json.dumps(HALF)])):
        with (folder / name).open("a") as stream:
            stream.write(text(lines))
    count = len(METRICS) + len(EVENTS)
    code, out, err = call("runs", ".")
    assert code == 0 and "run   3/3 " in out and err.startswith("warning: run/*.jsonl: ")
    assert err.endswith(" damaged lines are left out\n") and err.count("\n") == 1
    said = f"warning: run/*.jsonl: {count} damaged lines are left out\n"
    assert call("plot", "run", "--html")[::2] == (0, said)
    assert "half \\ud800" in (folder / "plot.html").read_text()


def test_one_bad_run_is_a_row(tmp_path, call, monkeypatch):
    """A file that cannot be read, and a config that is none of a run."""
    monkeypatch.chdir(tmp_path)
    for each in ("a", "b", "c"):
        made_run(tmp_path / "runs" / each, 3)
    (tmp_path / "runs" / "b" / "events.jsonl").mkdir()
    (tmp_path / "runs" / "c" / "config.toml").write_text("[training]\n")
    code, out, err = call("runs")
    rows = out.splitlines()[1:]
    assert (code, err) == (0, "") and "3/3" in rows[0] and "has no training.steps" in rows[2]
    assert "damaged: cannot read runs/b/events.jsonl: Not a regular file" in rows[1]


def test_numbers_that_are_unknown_or_extreme_are_drawn(tmp_path, call, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = made_run(tmp_path / "run", 3)
    unknown = dict.fromkeys(["train/tokens", "train/loss", "train/tokens_per_second"])
    rows = [{"step": 4} | unknown, {"step": 5, "train/loss": 1e150, "train/a_ms": math.nan}]
    with (folder / "metrics.jsonl").open("a") as stream:
        stream.write(text(map(json.dumps, rows)))
    assert call("plot", "run", "--all")[::2] == (0, "")
