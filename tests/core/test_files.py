"""One process at a time trains a run."""

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from torchmars.core.errors import UserError
from torchmars.core.files import is_gone, lock

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


def test_a_run_is_locked_while_its_process_lives_and_not_by_its_helpers(tmp_path, capsys):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(tmp_path)],
        cwd=ROOT,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    said, helper = holder.stdout.readline().split()
    assert said == "locked"
    try:
        with pytest.raises(UserError, match="another process is training: stop it") as refused:
            lock(tmp_path / "lock", "training", patience=0.1)
        assert "waiting for another process that is training" in capsys.readouterr().out
        owner = rf"\(process {holder.pid} on (.*), since \d{{4}}-[-\d]+ [:\d]+\)"
        assert re.search(owner, str(refused.value))[1] == socket.gethostname()
        holder.kill()
        lock(tmp_path / "lock", "training", patience=300)  # the helper would keep it for longer
        assert f"process {os.getpid()} on" in (tmp_path / "lock").read_text()
    finally:
        holder.kill()
        os.kill(int(helper), signal.SIGKILL)


def test_a_file_is_gone_only_where_that_is_known(tmp_path):
    file = tmp_path / "run" / "lock"
    assert is_gone(file)
    file.parent.mkdir()
    file.touch()
    assert not is_gone(file)
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    assert not is_gone(loop / "lock")  # an error that says nothing of the file
