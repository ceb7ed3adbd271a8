"""A launcher that another process starts ends with it."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from torchmars.cluster import process
from torchmars.cluster.process import CALLER, follow_caller, found_as_here

LAUNCHER = """
import os, signal, sys, time
from torchmars.cluster.process import follow_caller

def end(number, frame):
    print("told to save", flush=True)
    os._exit(0)

signal.signal(signal.SIGTERM, end)
print("started", flush=True)
sys.stdin.readline()
follow_caller()
print("follows", flush=True) if "TORCHMARS_CALLER" not in os.environ else None
time.sleep(600)
"""
CALLER_PROGRAM = f"""
import os, subprocess, sys, time
from torchmars.cluster import process

real, program = subprocess.Popen, {LAUNCHER!r}
process.subprocess.Popen = lambda command, **options: real(
    [sys.executable, "-c", program], stdin=0, **options
)
process.start_launcher(["config.toml"], os.environ)
time.sleep(600)
"""


@pytest.mark.parametrize("early", [True, False])
def test_a_launcher_whose_caller_is_killed_is_told_to_save(early):
    """Also where that is before it follows."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    caller = subprocess.Popen([sys.executable, "-c", CALLER_PROGRAM], **pipes)
    try:
        assert caller.stdout.readline() == "started\n"
        if early:
            caller.kill()
            caller.wait()
        caller.stdin.write("\n")
        caller.stdin.flush()
        if not early:
            assert caller.stdout.readline() == "follows\n"
            caller.kill()
        assert "told to save\n" in (caller.stdout.readline(), caller.stdout.readline())
    finally:
        caller.kill()
        caller.wait()


@pytest.mark.parametrize(
    "root,paths,found",
    [
        ("/clone", "", "/clone"),
        ("/clone", "::/own:/clone:", "/clone:/own"),
        ("/python/site-packages", ":/own", "/own"),  # it would come before Python's own modules
        ("/python/site-packages", "", ""),
    ],
)
def test_a_process_finds_this_package_and_nothing_of_the_current_folder(
    monkeypatch, root, paths, found
):
    monkeypatch.setattr(process, "ROOT", Path(root))
    assert found_as_here({"PYTHONPATH": paths}) == {"PYTHONPATH": found, "PYTHONSAFEPATH": "1"}


TRIAL = """
import os, time
from pathlib import Path
from torchmars.comparison.local import ForkedTrial
if __name__ == "__main__":
    trial = ForkedTrial(Path("trial.toml"), dict(os.environ, OMP_NUM_THREADS="1"))
    while trial.poll() is None:
        time.sleep(0.1)
"""


@pytest.mark.full
def test_a_forked_trial_takes_nothing_from_the_current_folder(tmp_path):
    """The server that it is forked from is a Python of its own."""
    (tmp_path / "trial.toml").write_text("[training]\nstpes = 3\n")
    program = tmp_path / "elsewhere" / "program.py"
    program.parent.mkdir()
    program.write_text(TRIAL)
    for name in ("random", "socket"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('of the current folder')")
    own = found_as_here(os.environ) | {"PYTHONSAFEPATH": ""}
    ended = subprocess.run(
        [sys.executable, program],
        cwd=tmp_path,
        env=os.environ | own,
        capture_output=True,
        text=True,
    )
    assert "of the current folder" not in ended.stderr
    assert "unknown key training.stpes" in (tmp_path / "output.log").read_text()


def test_a_launcher_that_was_started_by_hand_follows_nobody(monkeypatch):
    monkeypatch.delenv(CALLER, raising=False)
    follow_caller()
    assert not [each for each in threading.enumerate() if each.name == "parent"]
