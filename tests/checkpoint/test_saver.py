"""Saves beside the training: of one step each, one at a time. A failed one costs only itself."""

import contextlib
import os
import signal
import subprocess
import threading
import time
import types
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from tests.support.ranks import run_ranks
from tests.support.tiny import (
    listen,
    listen_here,
    metrics,
    run_folder_of,
    steps_kept,
    tiny_tables,
    train,
    write_text,
)
from torchmars.checkpoint import folder as folders
from torchmars.checkpoint import saver
from torchmars.checkpoint.folder import checkpoints, step_of
from torchmars.checkpoint.reader import reason
from torchmars.checkpoint.resume import newest_good, read_verified
from torchmars.checkpoint.saver import Saver, _TensorWriter
from torchmars.cluster import connection, process
from torchmars.config.load import config_from_tables
from torchmars.training.build import build_trainer
from torchmars.training.trainer import Trainer


@pytest.fixture
def tables(tmp_path):
    write_text(tmp_path)
    return tiny_tables(tmp_path, training={"steps": 12}, checkpoint={"interval": 2, "keep_last": 0})


def change_after_saving(tables):
    """Save in the background, where each write waits to be let go; meanwhile train on.

    Returns how long training waited, the steps visible from time to time, and whether the weights
    changed meanwhile and came back as they had been.
    """
    config = config_from_tables(tables, "in a test")
    trainer = build_trainer(config, connection.start(config.parallelism))
    write, wait, let_go = Saver._write, Saver.wait, {step: threading.Event() for step in (1, 2)}

    def write_once_let_go(saver, manifest, *rest):
        let_go[manifest.step].wait()
        return write(saver, manifest, *rest)

    Saver._write = write_once_let_go

    def visible():
        return [step_of(path) for path in checkpoints(trainer.checkpointer.saver.folder)]

    def save():
        trainer.train_step()
        trainer.state.step += 1
        return trainer.checkpointer.save(trainer.state)

    stalls = [save()]  # returns while its write has not begun
    then = {name: value.full_tensor().clone() for name, value in trainer.model.weights.items()}
    seen = [visible()]

    def let_go_and_wait(saver):
        seen.append(visible())
        let_go[1].set()
        wait(saver)

    Saver.wait = let_go_and_wait
    began = time.perf_counter()
    stalls.append(save())  # never two at once: it waits for the first, and not for its own write
    waited = time.perf_counter() - began
    seen.append(visible())
    changed = any(
        not torch.equal(value.full_tensor(), then[name])
        for name, value in trainer.model.weights.items()
    )
    Saver.wait = wait
    let_go[2].set()
    trainer.checkpointer.saver.finish()
    seen.append(visible())
    trainer.checkpointer.load(checkpoints(trainer.checkpointer.saver.folder)[0])
    same = all(
        torch.equal(value.full_tensor(), then[name])
        for name, value in trainer.model.weights.items()
    )
    return stalls, waited, seen, changed, same


def test_what_is_saved_is_the_step_that_was_saved(tables):
    for stalls, waited, seen, changed, same in run_ranks(change_after_saving, 2, tables):
        assert changed and same
        assert seen == [[], [], [1], [1, 2]]
        assert 0 < stalls[0] and 0 < stalls[1] <= waited


def test_asynchronous_and_not_the_losses_and_files_are_the_same(tables):
    other = tables | {
        "run": tables["run"] | {"name": "sync"},
        "checkpoint": tables["checkpoint"] | {"async_save": False},
    }
    train(2, tables, other)
    assert metrics(tables) == metrics(other)
    stalls = metrics(tables, "checkpoint/stall_ms")
    assert list(stalls) == [2, 4, 6, 8, 10, 12] and all(stall > 0 for stall in stalls.values())
    for one, two in zip(
        *(checkpoints(run_folder_of(each) / "checkpoints") for each in (tables, other))
    ):
        a, b = (read_verified(path, "full").files for path in (one, two))
        assert a["__0_0.distcp"] == b["__0_0.distcp"] and a["__1_0.distcp"] == b["__1_0.distcp"]


def with_failing_saves(tables, failing, on_rank):
    """Train, while the saves of the steps `failing` fail on one rank; what this rank printed."""
    write = Saver._write

    def fail(self, manifest, tensors, folder):
        if manifest.step in failing and self.layout.world.rank == on_rank:
            original, manifests_of_saver.describe = manifests_of_saver.describe, broken
            try:
                return write(self, manifest, tensors, folder)
            finally:
                manifests_of_saver.describe = original
        return write(self, manifest, tensors, folder)

    def broken(path):
        raise OSError(5, "Input/output error", str(path))

    from torchmars.checkpoint import manifest as manifests_of_saver

    Saver._write = fail
    return listen_here(tables)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("async_save", [True, False])
def test_a_failed_save_is_told_and_the_run_goes_on(tables, rank, async_save):
    tables["checkpoint"]["async_save"] = async_save
    out = run_ranks(with_failing_saves, 2, tables, (4, 6, 10), rank)[0]
    assert steps_kept(tables) == [2, 8, 12]
    assert (
        out.count("warning: the checkpoint") == 3
        and "step-00000006 could not be written: " in out
        and "Input/output error" in out
    )
    assert list(metrics(tables)) == list(range(1, 13))
    assert not list((run_folder_of(tables) / "checkpoints").glob("*.partial"))


def test_too_many_failed_saves_in_a_row_end_the_run_on_every_rank(tables):
    tables["training"]["steps"] = 1000
    outs = run_ranks(with_failing_saves, 2, tables, range(4, 1000), 1)
    for out in outs:
        assert (
            "error: the checkpoint" in out
            and "step-00000008 could not be written" in out
            and "checkpoint.max_failures = 3 in a row" in out
        )
    assert steps_kept(tables) == [2]
    read_verified(run_folder_of(tables) / "checkpoints" / "step-00000002", "full")


def test_the_last_save_must_not_fail(tables):
    outs = run_ranks(with_failing_saves, 2, tables, (12,), 0)
    assert all(
        "error: the checkpoint" in out and "step-00000012 could not be written" in out
        for out in outs
    )
    assert steps_kept(tables) == [2, 4, 6, 8, 10]


def train_with_folder_lost(tables, lose):
    """Train, while the first rank calls `lose` on the checkpoints' folder after the start."""
    run = Trainer.run

    def lose_and_run(trainer):
        if process.rank() == 0:
            lose(run_folder_of(tables) / "checkpoints")
        run(trainer)

    Trainer.run = lose_and_run
    return listen_here(tables)


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
def test_a_full_disk_is_told_in_its_own_words(tmp_path, room):
    """torch.save's own error says where its archive broke off."""
    writer = _TensorWriter(tmp_path / "aside")
    create = writer.fs.create_stream

    @contextlib.contextmanager
    def create_stream(path, mode):
        with create(path, mode) as stream:
            write, left = stream.write, room

            def full(data):
                nonlocal left
                left -= len(data)
                if left < 0:
                    raise OSError(28, "No space left on device")
                return write(data)

            others = {"__getattr__": lambda _, name: getattr(stream, name)}
            yield type("Full", (), others | {"write": staticmethod(full)})()

    writer.fs.create_stream = create_stream
    with pytest.raises(CheckpointException) as failed:
        dcp.save({"weights": torch.zeros(5000)}, storage_writer=writer, no_dist=True)
    assert reason(failed.value) == "No space left on device"


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

    The run ends with one line. The two are good, and with a larger disk the run goes on.
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
        assert [read_verified(path, "full").step for path in found] == [2, 4] and list(
            metrics(tables)
        ) == list(range(1, 13))
        folders.delete(found[0])
        assert "error" not in listen(2, tables | {"checkpoint": {"interval": 0}})
        assert steps_kept(tables) == [4, 12]


@needs_mount
def test_a_disk_too_full_for_metrics(tables, tmp_path):
    """Lines that do not fit are kept in memory; a start without room for any is refused."""
    from torchmars.metrics.events import EventLog
    from torchmars.metrics.journal import Journal

    with mounted(tmp_path / "small", "-t", "tmpfs", "-o", "size=16k", "none"):
        file = tmp_path / "small" / "metrics.jsonl"
        journal = Journal(file, 0, True, EventLog(None).deleted)
        filler = tmp_path / "small" / "filler"
        for step in range(1, 4):
            journal.write(step, {})
        with filler.open("wb") as stream, contextlib.suppress(OSError):
            stream.write(b"x" * 2**20)
        for step in range(4, 1000):
            journal.write(step, {})
        assert journal.pending and journal.warned
        filler.unlink()
        journal.write(1000, {})
        journal.close()
        assert (tmp_path / "small" / "metrics.jsonl").read_text().splitlines() == [
            f'{{"step": {step}}}' for step in range(1, 1001)
        ]


def make_read_only(folder):
    subprocess.run(["mount", "-o", "remount,ro,bind", str(folder)], check=True)


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
        assert "checkpoints: Read-only file system: set run.folder" in listen(2, tables)
    assert steps_kept(tables) == [2, 4]
    assert "continue  from step 4" in listen(2, tables)
    assert steps_kept(tables) == [2, 4, 6, 8, 10, 12]


def killed_at(tables, count):
    """Train, and die by SIGKILL at the `count`-th call that makes something durable or visible."""
    calls = 0

    def counted(original):
        def call(*args, **options):
            nonlocal calls
            calls += 1
            if calls == count:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **options)

        return call

    config = config_from_tables(tables, "in a test")
    trainer = build_trainer(config, connection.start(config.parallelism))
    save = trainer.save
    trainer.save = lambda: (
        trainer.checkpointer.saver.wait() or save()
    )  # the calls of two threads in one order
    os.fsync, os.rename, os.rmdir, os.unlink = (
        counted(each) for each in (os.fsync, os.rename, os.rmdir, os.unlink)
    )
    trainer.run()


@pytest.mark.parametrize("stride", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_a_crash_at_any_point_of_a_save_leaves_a_good_checkpoint(tables, tmp_path, stride):
    """A crash at each `stride`-th fsync, rename and removal of a run that keeps one checkpoint."""
    tables["training"]["steps"] = 4
    tables["checkpoint"] |= {"keep_last": 1, "keep_best": False}
    reference = tables | {"run": tables["run"] | {"name": "straight"}}
    train(1, reference)
    assert steps_kept(reference) == [4]
    newest = []
    while True:
        run = tables | {"run": tables["run"] | {"name": f"killed{len(newest)}"}}
        try:
            run_ranks(killed_at, 1, run, stride * len(newest) + 1)
            break  # more calls than a run makes
        except AssertionError as error:
            assert "rank 0 died: exit code -9" in str(error)
        found = newest_good(
            checkpoints(run_folder_of(run) / "checkpoints"),
            lambda path: read_verified(path, "full"),
            warn=pytest.fail,
        )
        newest.append(found[1].step if found else 0)
        if len(newest) % 2 == 0:
            train(1, run)
            assert metrics(run) == metrics(reference) and steps_kept(run)[-1] == 4
    assert newest == sorted(newest) and set(newest) == {0, 2, 4} and len(newest) > 15 // stride


def test_not_at_the_end(tables):
    tables["checkpoint"] |= {"interval": 2, "at_end": False}
    tables["training"]["steps"] = 5
    train(1, tables)
    assert steps_kept(tables) == [2, 4]


def train_by_the_clock(tables):
    """Train with a clock by which each step takes a minute."""
    train_step, minutes = Trainer.train_step, 0

    def step(self):
        nonlocal minutes
        minutes += 1
        return train_step(self)

    Trainer.train_step = step
    saver.time = types.SimpleNamespace(
        monotonic=lambda: 60.0 * minutes, perf_counter=time.perf_counter
    )
    listen_here(tables)


def test_by_the_clock(tables):
    tables["checkpoint"] |= {"interval": 0, "interval_minutes": 7}
    tables["training"]["steps"] = 60
    run_ranks(train_by_the_clock, 2, tables)
    assert len(steps_kept(tables)) > 2 and steps_kept(tables)[-1] == 60
    assert steps_kept(tables) == [7, 14, 21, 28, 35, 42, 49, 56, 60]
