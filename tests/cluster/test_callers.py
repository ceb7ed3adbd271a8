"""A launcher that another process starts ends with it."""

import subprocess
import sys
import threading

import pytest

from torchmars.cluster.callers import CALLER, follow_caller

LAUNCHER = """
import os, signal, sys, time
from torchmars.cluster.callers import follow_caller

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
from torchmars.cluster import callers

real, program = subprocess.Popen, {LAUNCHER!r}
callers.subprocess.Popen = lambda command, **options: real(
    [sys.executable, "-c", program], stdin=0, **options
)
callers.start_launcher(["config.toml"], os.environ)
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


def test_a_launcher_that_was_started_by_hand_follows_nobody(monkeypatch):
    monkeypatch.delenv(CALLER, raising=False)
    follow_caller()
    assert not [each for each in threading.enumerate() if each.name == "parent"]
