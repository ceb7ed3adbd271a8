"""One process at a time trains a run. One that stands still loses its right to."""

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from torchmars.cluster.process import ROUND
from torchmars.core import files
from torchmars.core.errors import UserError
from torchmars.core.files import lock
from torchmars.storage.local import FileOwner
from torchmars.storage.storage import LostOwnership

ROOT = Path(__file__).parents[2]
HOLDS = """
import os, sys, time
from pathlib import Path
from torchmars.core.files import lock
lock(Path(sys.argv[1]) / "lock", "training")
helper = os.fork()
if helper == 0:  # it outlives this one, as one that reads data may
    time.sleep(1000)
    os._exit(0)
print("locked", helper, flush=True)
sys.stdin.read()
"""


def started(program, folder):
    """Start a process of a Python program that is given a folder, with pipes to talk to it."""
    return subprocess.Popen(
        [sys.executable, "-c", program, str(folder)],
        cwd=ROOT,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )


def test_a_run_is_locked_while_its_process_lives_and_not_by_its_helpers(tmp_path, capsys):
    holder = started(HOLDS, tmp_path)
    said, helper = holder.stdout.readline().split()
    assert said == "locked"
    try:
        with pytest.raises(UserError, match="another process is training: stop it") as refused:
            lock(tmp_path / "lock", "training", patience=0.1)
        owner = rf"\(process {holder.pid} on (.*), since \d{{4}}-[-\d]+ [:\d]+\)"
        assert re.search(owner, str(refused.value))[1] == socket.gethostname()
        holder.kill()
        lock(tmp_path / "lock", "training", patience=300)  # the helper would keep it for longer
        assert f"process {os.getpid()} on" in (tmp_path / "lock").read_text()
    finally:
        holder.kill()
        os.kill(int(helper), signal.SIGKILL)


RUNS = """
import sys
from pathlib import Path
from torchmars.storage.local import FileOwner
from torchmars.storage.storage import LostOwnership
held = FileOwner(Path(sys.argv[1]) / "lock", "training")
held.check()
print("locked", flush=True)
sys.stdin.readline()
try:
    held.check()
except LostOwnership as error:
    print(error)
"""


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """A process that trains in `tmp_path` until it gets a line, and then says what it lost.

    Its machine met others in round 2 of the meeting "a".
    """
    monkeypatch.setenv(ROUND, "a:2")
    process = started(RUNS, tmp_path)
    assert process.stdout.readline() == "locked\n"
    yield process
    process.kill()


def test_a_later_round_of_its_machines_takes_its_run_at_once(tmp_path, monkeypatch, runs, capsys):
    """Also from a process that stands still, which has the lock of a file, and wakes up."""
    runs.send_signal(signal.SIGSTOP)
    monkeypatch.setenv(ROUND, "a:3")
    monkeypatch.setattr(files, "PATIENCE", 10**6)
    taken = FileOwner(tmp_path / "lock", "training")
    said = capsys.readouterr().err
    assert said.startswith(f"warning: process {runs.pid} on ") and "is over" in said
    third = started(ASKS, tmp_path)
    assert f"stop it first (process {os.getpid()} on" in third.communicate()[0]
    runs.send_signal(signal.SIGCONT)
    told, _ = runs.communicate("\n")
    assert told.startswith(f"{tmp_path}/lock was taken by process {os.getpid()} on ")
    taken.check()


ASKS = """
import sys
from pathlib import Path
from torchmars.core.errors import UserError
from torchmars.core.files import lock
try:
    lock(Path(sys.argv[1]) / "lock", "training", 0.1)
except UserError as error:
    print(error)
"""


@pytest.mark.parametrize("own", ["a:2", "a:1", "b:3", "", "a:x", "a", ":3"])
def test_no_other_process_takes_it(tmp_path, monkeypatch, runs, own):
    monkeypatch.setenv(ROUND, own)
    monkeypatch.setattr(files, "PATIENCE", 0.3)
    with pytest.raises(
        UserError, match=f"stop it first .process {runs.pid} on .*or remove .*/lock"
    ):
        FileOwner(tmp_path / "lock", "training")
    assert runs.communicate("\n") == ("", None)


def test_a_folder_that_was_deleted_is_no_lost_lock(tmp_path):
    held = FileOwner(tmp_path / "run" / "lock", "training")
    held.file.write_text("another")
    with pytest.raises(LostOwnership):
        held.check()
    held.file.unlink()
    held.check()
    held.release()
