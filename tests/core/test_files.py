"""One process at a time trains a run, in a folder that it can write."""

import errno
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from torchmars.core.errors import UserError
from torchmars.core.files import check_writable, is_gone, is_locked, lock, sha256

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


def test_a_fifo_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    assert is_locked(tmp_path / "fifo") is None
    with pytest.raises(OSError, match="Not a regular file"):
        sha256(tmp_path / "fifo")


def test_a_folder_that_can_be_written_is_left_as_it_is(tmp_path):
    check_writable(tmp_path / "runs" / "new")
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    "place,reason",
    [
        ("loop", "Too many levels of symbolic links"),
        ("dangling/below", "No such file or directory"),
        ("file/below", "Not a directory"),
        ("x" * 300, "File name too long"),
        ("read-only/below", "Read-only file system"),
    ],
)
def test_a_folder_that_cannot_be_written_is_told_with_the_reason(
    tmp_path, monkeypatch, place, reason
):
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "file").touch()
    (tmp_path / "read-only").mkdir()
    made = tempfile.TemporaryFile

    def make(dir):
        if dir.name == "read-only":
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return made(dir=dir)

    monkeypatch.setattr(tempfile, "TemporaryFile", make)
    with pytest.raises(UserError) as refused:
        check_writable(tmp_path / place, "--folder")
    told = f"cannot write to {tmp_path / place}: {reason}: set --folder to a folder you can write"
    assert str(refused.value) == told
