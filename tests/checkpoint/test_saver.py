"""Saves beside the training: of one step each, one at a time. A failed one costs only itself."""

import sys
import threading
import time
from itertools import product

import pytest
import torch

from tests.support.damage import die_at
from tests.support.full import FULL, full_but
from tests.support.ranks import run_ranks
from tests.support.storages import Creating, keep_on
from tests.support.tiny import listen_here, metrics, run_folder_of, steps_kept, train
from torchmars.checkpoint.folder import checkpoints, step_of
from torchmars.checkpoint.resume import newest_good, read_verified
from torchmars.checkpoint.saver import SWITCH_INTERVAL
from torchmars.cluster import connection
from torchmars.config.load import config_from_tables
from torchmars.core.errors import Unreachable, UserError
from torchmars.training.build import build_trainer


def change_after_saving(tables):
    """Save in the background, where each write waits to be let go; meanwhile train on.

    Returns how long training waited, the steps visible from time to time, and whether the weights
    changed meanwhile and came back as they had been.
    """
    config = config_from_tables(tables, "in a test")
    trainer = build_trainer(config, connection.start(config.parallelism))
    saver, let_go = trainer.checkpointer.saver, {step: threading.Event() for step in (1, 2)}
    wait, intervals = saver.wait, []

    def wait_to_be_let_go(staged, name):
        intervals.append(sys.getswitchinterval())
        let_go[step_of(staged)].wait()

    keep_on(Creating(wait_to_be_let_go))

    def visible():
        return [step_of(path) for path in checkpoints(saver.folder)]

    def save():
        trainer.train_step()
        trainer.state.step += 1
        return trainer.checkpointer.save(trainer.state)

    stalls = [save()]  # returns while its write has not begun
    then = {name: value.full_tensor().clone() for name, value in trainer.model.weights.items()}
    seen = [visible()]

    def let_go_and_wait():
        seen.append(visible())
        let_go[1].set()
        wait()

    saver.wait = let_go_and_wait
    began = time.perf_counter()
    stalls.append(save())  # never two at once: it waits for the first, and not for its own write
    waited = time.perf_counter() - began
    seen.append(visible())
    changed = any(
        not torch.equal(value.full_tensor(), then[name])
        for name, value in trainer.model.weights.items()
    )
    saver.wait = wait
    let_go[2].set()
    saver.finish()
    assert {round(each, 6) for each in intervals} == {SWITCH_INTERVAL} != {sys.getswitchinterval()}
    seen.append(visible())
    trainer.checkpointer.load(checkpoints(saver.folder)[0])
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
    tables["training"]["steps"] = 6
    other = tables | {
        "run": tables["run"] | {"name": "sync"},
        "checkpoint": tables["checkpoint"] | {"async_save": False},
    }
    train(2, tables, other)
    assert metrics(tables) == metrics(other)
    stalls = metrics(tables, "checkpoint/stall_ms")
    assert list(stalls) == [2, 4, 6] and all(stall > 0 for stall in stalls.values())
    for one, two in zip(
        *(checkpoints(run_folder_of(each) / "checkpoints") for each in (tables, other))
    ):
        a, b = (read_verified(path, "full").files for path in (one, two))
        assert a["__0_0.distcp"] == b["__0_0.distcp"] and a["__1_0.distcp"] == b["__1_0.distcp"]


def with_failing_saves(tables, failing, on_rank):
    """Train, while the saves of the steps `failing` fail on one rank; what this rank printed."""

    def fail(staged, name):
        if step_of(staged) in failing:
            raise OSError(5, "Input/output error", name)

    def change(trainer):
        if trainer.layout.world.rank == on_rank:
            keep_on(Creating(fail))

    return listen_here(tables, change)


@pytest.mark.parametrize("async_save,rank", full_but([(True, 1)], product([True, False], [0, 1])))
def test_a_failed_save_is_told_and_the_run_goes_on(tables, rank, async_save):
    tables["checkpoint"]["async_save"] = async_save
    out = run_ranks(with_failing_saves, 2, tables, (4, 6, 10), rank)[0]
    assert steps_kept(tables) == [2, 8, 12]
    assert out.count("warning: the checkpoint") == 3
    assert "step-00000006 could not be written: " in out
    assert "Input/output error" in out
    assert list(metrics(tables)) == list(range(1, 13))
    assert not list((run_folder_of(tables) / "checkpoints").glob("*.partial"))


def test_too_many_failed_saves_in_a_row_end_the_run_on_every_rank(tables):
    tables["training"]["steps"] = 1000
    outs = run_ranks(with_failing_saves, 2, tables, range(4, 1000), 1)
    for out in outs:
        assert "error: the checkpoint" in out
        assert "step-00000008 could not be written" in out
        assert "checkpoint.max_failures = 3 in a row" in out
    assert steps_kept(tables) == [2]
    read_verified(run_folder_of(tables) / "checkpoints" / "step-00000002", "full")


@FULL
def test_the_last_save_must_not_fail(tables):
    outs = run_ranks(with_failing_saves, 2, tables, (12,), 0)
    assert all(
        "error: the checkpoint" in out and "step-00000012 could not be written" in out
        for out in outs
    )
    assert steps_kept(tables) == [2, 4, 6, 8, 10]


def killed_at(tables, count):
    """Train, and die by SIGKILL at the `count`-th call that makes something durable or visible."""
    config = config_from_tables(tables, "in a test")
    trainer = build_trainer(config, connection.start(config.parallelism))
    save = trainer.save
    trainer.save = lambda: (
        trainer.checkpointer.saver.wait() or save()
    )  # the calls of two threads in one order
    die_at(count)
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


def write_after_another_took_over(tables):
    """Train on after another process has taken the run; what it says, and what changed."""
    config = config_from_tables(tables, "in a test")
    trainer = build_trainer(config, connection.start(config.parallelism))
    for _ in range(2):
        trainer.train_step()
        trainer.state.step += 1
        trainer.save()
        trainer.checkpointer.saver.wait()
    folder = trainer.checkpointer.saver.folder
    (folder / "step-00000009-1.partial").mkdir()  # the other's, on its way
    (folder / "step-00000010").mkdir()
    trainer.checkpointer.saver.owned.run.file.write_text("another")

    def content():
        return sorted(folder.iterdir()), (config.run.path / "metrics.jsonl").read_bytes()

    before, told = content(), []
    for work in (
        lambda: trainer.metrics.journal.write({"step": 3, "train/loss": 1.0}),
        lambda: trainer.metrics.journal.rewind(0, False),
        lambda: trainer.checkpointer.saver.retention.tidy(2),
        lambda: (trainer.checkpointer.save(trainer.state), trainer.checkpointer.saver.finish()),
    ):
        try:
            work()
        except UserError as error:
            told.append(str(error))
    return told, content() == before


def test_a_process_whose_run_another_has_taken_writes_nothing(tables):
    ((told, same),) = run_ranks(write_after_another_took_over, 1, tables)
    assert same and len(told) == 3  # of a failed tidying there is a warning
    assert all("lock was taken by process" in each for each in told)


class SilentStore:
    """The owner of a folder in a store that does not answer."""

    def check(self):
        raise Unreachable("the store does not answer")

    def release(self):
        pass


def train_while_the_store_is_silent(tables):
    """What each save says; the store holds checkpoints, and not the run's metrics."""

    def change(trainer):
        trainer.checkpointer.saver.owned.checkpoints = SilentStore()

    return listen_here(tables, change)


def test_a_silent_store_costs_saves_and_no_line_of_metrics(tables):
    """Else the first line of metrics during an outage would end the run."""
    tables["checkpoint"] |= {"interval": 8, "max_failures": 9}
    tables["training"]["steps"] = 20
    [said] = run_ranks(train_while_the_store_is_silent, 1, tables)
    assert list(metrics(tables)) == [*range(1, 21)]
    assert said.count("could not be written: the store does not answer") == 4  # one is the end
