"""torchmars runs."""

import functools
import json

import pytest

from tests.support.records import listed_run
from torchmars.records.events import EventLog


@pytest.fixture
def run(call, monkeypatch, tmp_path):
    """Runs `torchmars runs ARGS`; returns its exit code, output and errors."""
    monkeypatch.chdir(tmp_path)

    return functools.partial(call, "runs")


def test_a_line_for_each_run(run, tmp_path):
    listed_run(tmp_path / "runs" / "good", ["started", "stopped"], reported=[10, 20], steps=4000)
    listed_run(tmp_path / "runs" / "new", reported=[])
    listed_run(tmp_path / "runs" / "torn")
    (tmp_path / "runs" / "torn" / "config.toml").write_text("[training")
    (tmp_path / "runs" / "no run").mkdir()
    code, out, err = run("--json", "runs.json")
    assert (code, err) == (0, "")
    heading, good, new, torn = out.splitlines()
    assert heading.split()[:3] == ["run", "step", "loss"]
    assert good.split() == ["runs/good", "20/4,000", "20.0000", "-", "-", "-", *good.split()[6:]]
    assert good.endswith(" ago  stopped") and new.split()[1:6] == ["0/40", "-", "-", "-", "-"]
    assert torn.split()[:2] == ["runs/torn", "damaged:"] and "is not valid TOML" in torn
    found = json.loads((tmp_path / "runs.json").read_text())["runs"]
    assert [each["folder"] for each in found] == ["runs/good", "runs/new", "runs/torn"]
    assert (found[0]["state"], found[0]["loss"], found[0]["step"]) == ("stopped", 20.0, 20)
    assert set(found[2]) == {"folder", "damaged"}
    assert [line.split()[0] for line in run("runs/good")[1].splitlines()] == ["run", "runs/good"]


def test_a_run_whose_machines_have_come_and_gone_says_so(run, tmp_path):
    folder = tmp_path / "runs" / "books"
    listed_run(folder, [], reported=[10])
    log = EventLog(folder)
    log.add("started", 0, machines=3)
    for kind in ("left", "left", "joined"):
        log.add(kind, 8, machine="m1")
    log.add("started", 8, machines=2)
    log.add("stopped", 10)
    code, out, _ = run("--json", "runs.json")
    assert code == 0 and out.endswith("  stopped, 2 machines (2 left, 1 joined)\n")
    [found] = json.loads((tmp_path / "runs.json").read_text())["runs"]
    assert (found["machines"], found["left"], found["joined"]) == (2, 2, 1)


def test_names_do_not_steer_a_terminal(run, tmp_path):
    for name in ("\x1b]0;title\x07", "\u202eevil\x9b2J", "日本\nrow"):
        listed_run(tmp_path / "runs" / name)
    code, out, err = run()
    names = [line.split()[0] for line in out.splitlines()]
    assert (code, err) == (0, "") and names == [
        "run",
        r"runs/\x1b]0;title\x07",
        r"runs/\u202eevil\x9b2J",
        r"runs/日本\nrow",
    ]


def test_folders_without_runs(run, tmp_path):
    code, out, err = run()
    assert code == 2 and err.startswith("error: there is no folder runs: ")
    (tmp_path / "runs" / "m").mkdir(parents=True)
    _, _, err = run("m")
    assert err == "error: there is no folder m: did you mean runs/m?\n"
    assert run() == (0, "there are no runs in runs\n", "")
    (tmp_path / "file").write_text("")
    assert run("file")[0] == 2 and run("--json", "file/x.json")[0] == 2
