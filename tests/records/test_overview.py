"""Which runs there are, and whether each runs."""

import os
import subprocess
import sys
import time

import pytest

from tests.support.records import listed_run
from tests.support.tiny import tiny_config
from torchmars.core.files import is_locked
from torchmars.records.events import EventLog
from torchmars.records.lines import last_step
from torchmars.records.overview import find_runs, is_complete, overview

HOLD = """
import sys
from pathlib import Path
from torchmars.core.files import lock
lock(Path(sys.argv[1]), "training")
print("held", flush=True)
sys.stdin.read()
"""


def silent(folder, host):
    """Make a run one that has not written for an hour, and whose lock was last held on `host`."""
    for file in folder.glob("*"):
        os.utime(file, (time.time() - 3600,) * 2)
    (folder / "lock").write_text(f"process 1 on {host}, since 2026-01-01 00:00:00")


@pytest.mark.parametrize(
    "run,state",
    [
        ({"events": ["started", "saved"]}, "failed"),
        ({"events": ["started", "stopped"]}, "stopped"),
        ({"events": ["started", "stopped", "started"]}, "failed"),
        ({"events": ["started", "failed"]}, "failed"),
        ({"events": ["started", "complete"]}, "complete"),
        ({"events": ["started", "saved"], "reported": [40]}, "failed"),  # its last save is missing
        ({"events": ["started", "saved"], "saved": [40]}, "complete"),  # killed in its last line
        ({"reported": []}, "failed"),
    ],
)
def test_how_a_run_ended(tmp_path, run, state):
    folder = listed_run(tmp_path / "run", **run)
    (folder / "lock").write_text(f"process 1 on {os.uname().nodename}, since 2026-01-01 00:00:00")
    assert overview(folder)["state"] == state


def test_a_run_whose_lock_is_held_runs(tmp_path):
    folder = listed_run(tmp_path / "run", ["started", "stopped"])
    file = folder / "lock"
    assert is_locked(file) is False
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, file], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout.readline() == b"held\n"
        for _ in range(2):  # the first question takes nothing from the run
            assert is_locked(file) is True and overview(folder)["state"] == "running"
        holder.stdin.close()
    assert is_locked(file) is False and overview(folder)["state"] == "stopped"


def test_where_locks_do_not_tell_recent_writes_do(tmp_path):
    folder = listed_run(tmp_path / "run", ["started"])
    silent(folder, "another-machine")
    assert is_locked(folder / "lock") is None and overview(folder)["state"] == "failed"
    EventLog(folder).add("saved", 20)
    assert overview(folder)["state"] == "running"
    EventLog(folder).add("stopped", 20)
    assert overview(folder)["state"] == "stopped"


def test_the_last_values_of_a_long_run(tmp_path):
    folder = listed_run(tmp_path / "run", reported=range(1, 9001))
    file = folder / "metrics.jsonl"
    with file.open("a") as stream:
        stream.write('{"step": 9001, "train/lo')
    assert last_step(file) == 9000 and overview(folder)["validation_loss"] is None
    lines = file.read_text().splitlines()
    lines[0] = '{"step": 1, "validation/loss": 3.5}'
    file.write_text("\n".join(lines))
    found = overview(folder)
    assert (found["step"], found["loss"], found["validation_loss"]) == (9000, 9000.0, 3.5)
    assert found["tokens_per_second"] is None
    assert last_step(folder / "none") == 0


@pytest.mark.parametrize(
    "events,asked,complete",
    [
        (["started", "complete"], {"steps": 40}, True),
        (["started", "complete"], {"steps": 80}, False),  # it goes on
        (["started", "complete", "started"], {"steps": 40}, False),
        (["started", "stopped"], {"steps": 40, "stop_after": 10}, True),
        (["started", "stopped"], {"steps": 40}, False),
        ([], {"steps": 40}, False),
    ],
)
def test_a_run_is_complete_by_the_steps_that_are_asked_for(tmp_path, events, asked, complete):
    config = tiny_config(tmp_path, training=asked)
    assert not is_complete(config)  # there is no run
    listed_run(config.run.path, events)
    assert is_complete(config) == complete


def test_runs_are_found_three_levels_deep(tmp_path):
    for name in ("a", "group/b", "group/c", "a/logs", "x/trials/z", "1/2/3/4"):
        listed_run(tmp_path / name)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    names = [str(run.relative_to(tmp_path)) for run in find_runs(tmp_path)]
    assert names == ["a", "group/b", "group/c", "x/trials/z"]
    assert find_runs(tmp_path / "a") == [tmp_path / "a"]
