"""Saves on a disk that is full, read-only or gone: told in one line, and nothing good is lost."""

import contextlib
import os
import subprocess
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from tests.support.full import FULL
from tests.support.ranks import run_ranks
from tests.support.tiny import (
    listen,
    listen_here,
    metrics,
    run_folder_of,
    steps_kept,
    train,
)
from torchmars import storage
from torchmars.checkpoint.folder import checkpoints
from torchmars.checkpoint.reader import first_reason
from torchmars.checkpoint.resume import read_verified
from torchmars.checkpoint.writer import _TensorFiles
from torchmars.cluster import process
from torchmars.core.files import DurableFile
from torchmars.storage.local import LOCAL, LocalStorage


def train_with_folder_lost(tables, lose):
    """Train, while the first rank calls `lose` on the checkpoints' folder after the start."""

    def change(trainer):
        if process.rank() == 0:
            lose(run_folder_of(tables) / "checkpoints")

    return listen_here(tables, change)


def test_a_folder_that_cannot_be_written_ends_with_one_line(tables):
    """Something that is no folder stands where checkpoints go."""
    for out in run_ranks(train_with_folder_lost, 2, tables, Path.touch):
        assert (
            out.count("error: ") == 1
            and "checkpoint.max_failures = 3 in a row" in out
            and "Not a directory" in out
        )


@pytest.mark.filterwarnings("ignore:torch.distributed is")
@pytest.mark.parametrize("room", [0, 100, 5000])
def test_a_full_disk_is_told_in_its_own_words(tmp_path, monkeypatch, room):
    """torch.save's own error says where its archive broke off."""

    class Full(LocalStorage):
        def create(self, file):
            return FullFile(file)

    class FullFile(DurableFile):
        left = room

        def write(self, data):
            self.left -= len(data)
            if self.left < 0:
                raise OSError(28, "No space left on device")
            return super().write(data)

    monkeypatch.setattr(storage, "LOCAL", Full())
    writer = _TensorFiles(tmp_path)
    with pytest.raises(CheckpointException) as failed:
        dcp.save({"weights": torch.zeros(5000)}, storage_writer=writer, no_dist=True)
    assert first_reason(failed.value) == "No space left on device"


needs_mount = pytest.mark.skipif(
    os.geteuid() != 0
    or subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode != 0,
    reason="mounting a small file system needs root",
)


@contextlib.contextmanager
def mounted(path, *options):
    path.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", *options, str(path)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", str(path)], check=True)


@needs_mount
def test_a_full_disk(tables, tmp_path):
    """Checkpoints of 0.8 MiB on a disk of 2: two fit.

    The run ends with one line. The two are good, and with a larger disk the run continues.
    """
    with mounted(tmp_path / "runs", "-t", "tmpfs", "-o", "size=2m", "none"):
        out = listen(2, tables)
        assert (
            out.count("warning: the checkpoint") == 3
            and out.count("error: the checkpoint") == 1
            and "No space left on device" in out
        )
        assert out.count("could not be written: No space left on device") == 4  # the disk's words
        found = checkpoints(run_folder_of(tables) / "checkpoints")
        assert [read_verified(path, "full").step for path in found] == [2, 4]
        assert not list(found[0].parent.glob("*.partial"))
        tables["checkpoint"] |= {"max_failures": 100}
        out = listen(2, tables)  # survives to its end, which cannot be saved
        assert (
            "continue  from step 4" in out
            and "step 12/12" in out
            and out.count("error: the checkpoint") == 1
        )
        assert [read_verified(path, "full").step for path in found] == [2, 4]
        # A save may have left no room for a line: it is missing, and all others are whole.
        assert list(metrics(tables))[:4] == [1, 2, 3, 4]
        LOCAL.delete(found[0])
        assert "error" not in listen(2, tables | {"checkpoint": {"interval": 0}})
        assert steps_kept(tables) == [4, 12]


@needs_mount
def test_a_disk_too_full_for_metrics(tmp_path, capsys):
    """Lines that do not fit are left out, with one warning; those after them are written."""
    from torchmars.records.lines import Journal, measurements, read_lines

    with mounted(tmp_path / "small", "-t", "tmpfs", "-o", "size=16k", "none"):
        file = tmp_path / "small" / "metrics.jsonl"
        journal = Journal(file)
        filler = tmp_path / "small" / "filler"
        for step in range(1, 4):
            journal.write({"step": step})
        with filler.open("wb") as stream, contextlib.suppress(OSError):
            stream.write(b"x" * 2**20)
        for step in range(4, 1000):
            journal.write({"step": step})
        filler.unlink()
        journal.write({"step": 1000})
        said = f"warning: cannot write {file}: No space left on device; lines that it does not take"
        assert capsys.readouterr().err == f"{said} are left out\n"
        rows = read_lines(file, measurements)
        steps = [row["step"] for row in rows]
        assert not rows.damaged
        assert steps == [*range(1, len(steps)), 1000] and 3 < len(steps) < 1000


def make_read_only(folder):
    subprocess.run(["mount", "-o", "remount,ro,bind", str(folder)], check=True)


@FULL
@needs_mount
def test_a_folder_that_becomes_read_only(tables, tmp_path):
    """The folder is lost in mid-run, after the checkpoint of step 4.

    The run ends with one line, no start is made, and it goes on once it may write again.
    """
    folder = run_folder_of(tables) / "checkpoints"
    train(2, tables | {"training": tables["training"] | {"steps": 4}})
    with mounted(folder, "-o", "bind", str(folder)):
        out = run_ranks(train_with_folder_lost, 2, tables, make_read_only)[0]
        assert (
            "continue  from step 4" in out
            and "Read-only file system" in out
            and out.count("error: the checkpoint") == 1
        )
        assert "checkpoints: set run.folder to a folder you can write" in listen(2, tables)
    assert steps_kept(tables) == [2, 4]
    assert "continue  from step 4" in listen(2, tables)
    assert steps_kept(tables) == [2, 4, 6, 8, 10, 12]
