"""Damaged files of runs: what is good is read, what is left out is counted and said."""

import json
import math

import pytest

from tests.support.records import made_run
from torchmars.records.events import EVENTS_FILE, EventLog, read_events
from torchmars.records.lines import Journal
from torchmars.records.run import read_run

DIGITS, NESTED = "9" * 400, "[" * 5000 + "]" * 5000
METRICS = [
    '{"step": null, "train/loss": 1}',
    '{"step": "7", "train/loss": 1}',
    '{"step": true, "train/loss": 1}',
    '{"step": 7.5, "train/loss": 1}',
    '{"step": -7, "train/loss": 1}',
    f'{{"step": {DIGITS}, "train/loss": 1}}',
    f'{{"step": {"9" * 5000}, "train/loss": 1}}',
    f'{{"step": 7, "train/loss": {DIGITS}}}',
    f'{{"step": 7, "train/loss": {NESTED}}}',
    '{"step": 7, "train/loss": 1e308}',
    '{"step": 7, "train/tokens": -Infinity}',
    '{"step": 7, "train/loss": [[1]]}',
    '{"step": 7, "train/loss": {"a": 1}}',
    '{"step": 7, "train/loss": "\\ud800"}',
    '{"step": 7, "train/loss": 1, "train/tokens": false}',
    '"step"',
    '{"step": 7, "train/lo',
    "\x00",
]
EVENTS = [
    '{"time": 1.8e9, "event": "saved", "step": null}',
    '{"time": 1.8e9, "event": "saved", "step": "7"}',
    f'{{"time": 1.8e9, "event": "saved", "step": {DIGITS}}}',
    '{"time": 1e300, "event": "saved", "step": 7}',
    '{"time": -1e10, "event": "saved", "step": 7}',
    '{"time": NaN, "event": "saved", "step": 7}',
    f'{{"time": {DIGITS}, "event": "saved", "step": 7}}',
    '{"time": true, "event": "saved", "step": 7}',
    '{"time": 1.8e9, "event": ["saved"], "step": 7}',
    '{"time": 1.8e9, "event": null, "step": 7}',
    '{"event": "saved", "step": 7}',
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
    Journal(file, EventLog(None).deleted).rewind(2, True)
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


@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl"])
def test_one_bad_run_is_a_row(tmp_path, call, monkeypatch, name):
    """A file that cannot be read, a config without a batch size or with a number beyond all."""
    monkeypatch.chdir(tmp_path)
    for each in ("a", "b", "c", "d"):
        made_run(tmp_path / "runs" / each, 3)
    (tmp_path / "runs" / "b" / name).unlink(missing_ok=True)
    (tmp_path / "runs" / "b" / name).mkdir()
    (tmp_path / "runs" / "c" / "config.toml").write_text("[training]\nsteps = 3\n")
    (tmp_path / "runs" / "d" / "config.toml").write_text(f"[training]\nsteps = {DIGITS}\n")
    code, out, err = call("runs")
    rows = out.splitlines()[1:]
    assert (code, err) == (0, "") and [row.split()[0] for row in rows] == [
        f"runs/{each}" for each in "abcd"
    ]
    assert "3/3" in rows[0] and "3/3" in rows[2] and "has no training.steps" in rows[3]
    assert f"damaged: cannot read runs/b/{name}: Is a directory" in rows[1]


def test_numbers_that_are_unknown_or_extreme_are_drawn(tmp_path, call, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made_run(tmp_path / "good", 3)
    folder = made_run(tmp_path / "run", 3)
    unknown = dict.fromkeys(["train/tokens", "train/loss", "train/tokens_per_second"])
    extreme = {"train/loss": 1e150, "train/tokens": 2**63 - 1, "train/tokens_per_second": 1e-150}
    rows = [{"step": 4} | unknown, {"step": 10**15} | extreme, {"step": 5, "train/a_ms": math.nan}]
    with (folder / "metrics.jsonl").open("a") as stream:
        stream.write(text(map(json.dumps, rows)))
    for kind in ("--all", "--html"):
        assert call("plot", "run", "good", kind)[::2] == (0, "")


def test_a_config_without_a_batch_size(tmp_path, call, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = made_run(tmp_path / "run", 3)
    (folder / "config.toml").write_text("[training]\nsteps = 3\n")
    # Its reports say how many tokens were read.
    assert call("plot", "--html", "run")[::2] == (0, "")
    (folder / "metrics.jsonl").write_text('{"step": 1, "train/loss": 1.0}\n')
    code, _, err = call("plot", "--html", "run")
    assert code == 2 and "run/config.toml has no training.global_batch_size or no" in err
