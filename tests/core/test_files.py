"""Folders that can be written, files that are gone, and what is no file."""

import errno
import os

import pytest

from torchmars.core.errors import UserError
from torchmars.core.files import (
    check_writable,
    is_gone,
    is_locked,
    open_to_write,
    sha256,
    sync_folder,
)


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
    with pytest.raises(OSError):
        open_to_write(tmp_path / "fifo", os.O_WRONLY | os.O_APPEND)


def test_a_folder_that_can_be_written_is_left_as_it_is(tmp_path):
    check_writable(tmp_path / "runs" / "new")
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("place", ["loop", "dangling/below", "file/below", "read-only/below"])
def test_a_folder_that_cannot_be_written_is_told(tmp_path, monkeypatch, place):
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "file").touch()
    (tmp_path / "read-only").mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: path.name != "read-only")
    with pytest.raises(UserError) as refused:
        check_writable(tmp_path / place, "--folder")
    told = f"cannot write to {tmp_path / place}: set --folder to a folder you can write"
    assert str(refused.value) == told


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EIO])
def test_a_folder_that_cannot_be_made_durable_is_no_error_of_the_disk(
    tmp_path, monkeypatch, number
):
    def fail(descriptor):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fail)
    if number == errno.EIO:
        with pytest.raises(OSError, match="Input/output error"):
            sync_folder(tmp_path)
    else:
        sync_folder(tmp_path)
