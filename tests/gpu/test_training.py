"""Runs on one GPU, under NCCL: restarts, signals, hangs, saves, and the memory of the plan."""

import os
import re
import signal
from unittest import mock

import pytest
import torch

from tests.gpu.device import DEVICE, ON_GPU, sized, without_waiting
from tests.support.commands import finish_run, ranks_of, start_run
from tests.support.ranks import run_ranks
from tests.support.tiny import (
    metrics,
    run_folder_of,
    tiny_config,
    tiny_tables,
    write_config,
    write_text,
)
from torchmars.checkpoint.folder import checkpoints
from torchmars.checkpoint.resume import newest_config
from torchmars.checkpoint.staging import Staging
from torchmars.cluster import connection
from torchmars.config.load import config_from_tables
from torchmars.core.errors import EXIT_HUNG
from torchmars.parallel import fsdp, graphs, parallel_model
from torchmars.planning.plan import plan_run
from torchmars.training.build import build_trainer

pytestmark = pytest.mark.gpu


def test_a_run_in_bfloat16_goes_on_where_it_was_stopped(tmp_path):
    write_text(tmp_path)
    settings = {
        "training": {"dtype": "bfloat16", "steps": 3, **sized({}, {"global_batch_size": 2})},
        "schedule": {"name": "constant"},
        "checkpoint": {"interval": 3},
    }
    losses = {}
    for name, steps in (("straight", ["6"]), ("stopped", ["3", "6"])):
        run = {"name": name}
        file = tmp_path / f"{name}.toml"
        write_config(tiny_config(tmp_path, run=run, **settings), file)
        for last in steps:
            code, out, err = finish_run(file, "--training.steps", last, ranks=1, NGPU="1")
            assert code == 0 and f"({DEVICE.type}, " in out and "bfloat16 compute" in out, err
        losses[name] = metrics(tiny_tables(tmp_path, run=run))
    assert list(losses["stopped"]) == [1, 2, 3, 4, 5, 6]
    assert losses["stopped"] == pytest.approx(losses["straight"], rel=1e-3)


def test_a_run_compiles_and_a_restart_finds_what_it_compiled(tmp_path, monkeypatch):
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):  # torch sets them as it compiles
        monkeypatch.delenv(name, raising=False)
    write_text(tmp_path)
    training = {"steps": 4, "compile": True}  # which is the default of GPUs
    tables = tiny_tables(tmp_path, model={"n_layer": 1}, training=training)
    write_config(config_from_tables(tables, "in a test"), tmp_path / "tiny.toml")
    cache, sizes = run_folder_of(tables) / "compile_cache", []
    for last in ("2", "4"):
        code, out, err = finish_run(
            tmp_path / "tiny.toml", "--training.steps", last, ranks=1, NGPU="1"
        )
        assert code == 0 and "compiled blocks" in out, err
        sizes.append(len(list((cache / "fxgraph").glob("*/*"))))
    assert sizes[0] == sizes[1] > 0
    assert newest_config(checkpoints(run_folder_of(tables) / "checkpoints"))["training"]["compile"]


def test_a_signal_saves_and_a_dead_rank_is_started_again(tmp_path):
    write_text(tmp_path)
    tables = tiny_tables(tmp_path, training={"steps": 10**6, "compile": False})
    tables["checkpoint"] = {"interval": 5, "keep_last": 2}
    write_config(config_from_tables(tables, "in a test"), tmp_path / "tiny.toml")
    process = start_run(tmp_path / "tiny.toml", ranks=2, NGPU="1", MAX_RESTARTS="1")
    lines = iter(process.stdout)
    assert any("checkpoint " in line and "step-" in line for line in lines)
    [rank, _] = ranks_of(process.pid)  # the second one waits for its turn
    os.kill(rank, signal.SIGKILL)
    assert any("continue " in line for line in lines)
    assert any("checkpoint " in line and "step-" in line for line in lines)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 75, err
    step = int(re.search(r"stopped   by SIGTERM after step (\d+), saved", out)[1])
    assert checkpoints(run_folder_of(tables) / "checkpoints")[-1].name == f"step-{step:08d}"


HANGS = """
import time, torchmars.cluster.watchdog
from torchmars.parallel.parallel_model import ParallelModel

torchmars.cluster.watchdog.GRACE_SECONDS = 1.0
original, calls = ParallelModel.backward, []

def backward(self, *args, **options):
    calls.append(1)
    if len(calls) == 4:
        time.sleep(10000)
    return original(self, *args, **options)

ParallelModel.backward = backward
"""


def test_a_rank_that_hangs_leaves_the_flight_recorder(tmp_path):
    write_text(tmp_path)
    guards = {"hang_seconds": sized(60.0, 3.0)}
    tables = tiny_tables(tmp_path, guards=guards, training={"compile": False})
    write_config(config_from_tables(tables, "in a test"), tmp_path / "tiny.toml")
    (tmp_path / "sitecustomize.py").write_text(HANGS)
    path = f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    code, _, err = finish_run(tmp_path / "tiny.toml", ranks=1, NGPU="1", PYTHONPATH=path)
    assert code == EXIT_HUNG
    hang = run_folder_of(tables) / "hang"
    assert (
        "has been in step 4 for" in err and "in backward" in (hang / "rank-00000.txt").read_text()
    )
    assert (run_folder_of(tables) / "hang" / "flight_0").stat().st_size > 1000


@pytest.fixture
def trainer(tmp_path):
    write_text(tmp_path)
    training = {"dtype": "bfloat16", "seq_len": 256, "microbatch_size": 8, "compile": False}
    shape = {"n_layer": 4, "n_head": 4, "n_embd": 256, "vocab_size": 4096}
    small = {"model": {"n_layer": 1}, "training": {"compile": False}}
    config = tiny_config(tmp_path, **sized({"model": shape, "training": training}, small))
    yield build_trainer(config, connection.start(config.parallelism))
    connection.stop()


def test_a_step_of_the_whole_model_does_not_wait_for_the_device(trainer):
    batch = [window.to(DEVICE) for window in trainer.loader.step()]
    for step in range(3):
        if step < 2:  # the first ones make gradients, state and streams
            trainer.model.backward(batch)
            trainer.optimizer.step()
            trainer.model.follow_weights()
        else:
            with without_waiting():
                trainer.model.backward(batch)
                trainer.optimizer.step()
                trainer.model.follow_weights()
        trainer.optimizer.zero_grad()


def test_a_save_copies_into_pinned_memory_and_keeps_it(trainer):
    staging = trainer.checkpointer.saver.staging
    state = {name: weight.detach() for name, weight in trainer.model.weights.items()}
    copies = []
    for _ in range(2):
        copied, complete = staging.copy(state)
        complete()
        copies.append(copied)
    for name, weight in state.items():
        first, second = (each[name] for each in copies)
        assert first.is_pinned() == ON_GPU and first.data_ptr() == second.data_ptr()
        assert torch.equal(second, weight.cpu())


def test_what_a_save_copies_is_what_was_there_when_it_began():
    """Large tensors are still being copied when the host tells the device to change them."""
    staging = Staging(DEVICE)
    size = (sized(2**26, 2**10),)
    tensors = {f"large {n}": torch.full(size, n + 1.0, device=DEVICE) for n in range(4)}
    tensors["small"] = torch.tensor(9.0, device=DEVICE)
    were = {name: value.flatten()[0].item() for name, value in tensors.items()}
    for _ in range(2):  # the first copy also takes pinned memory, which waits
        copies, complete = staging.copy(tensors)
        staging.before_change()
        for value in tensors.values():
            value.neg_()
        complete()
        for name, value in copies.items():
            assert (value == were[name]).all(), name
            were[name] = -were[name]


def measured_peak(tables):
    """The most memory that a step has taken, after two that make gradients and state."""
    config = config_from_tables(tables, "in a test")
    trainer = build_trainer(config, connection.start(config.parallelism))
    batch = trainer.loader.step()
    for step in range(3):
        if step == 2 and ON_GPU:
            torch.cuda.reset_peak_memory_stats()
        trainer.model.backward(batch)
        trainer.optimizer.step()
        trainer.model.follow_weights()
        if step < 2:
            trainer.optimizer.zero_grad()
    return torch.cuda.max_memory_allocated()


def planned_peak(tables):
    return plan_run(config_from_tables(tables, "in a test"), 1, 1).largest.peak


def test_the_peak_of_the_plan_is_that_of_a_step(tmp_path):
    write_text(tmp_path, documents=400)
    training = {"dtype": "bfloat16", "seq_len": 512, "microbatch_size": 8, "compile": False}
    shape = {"n_layer": 6, "n_head": 8, "n_embd": 512, "vocab_size": 16384}
    small = {"model": {"n_layer": 1}, "training": {"compile": False}}
    tables = tiny_tables(tmp_path, **sized({"model": shape, "training": training}, small))
    [measured], [planned] = (run_ranks(peak, 1, tables) for peak in (measured_peak, planned_peak))
    if ON_GPU:
        assert planned == pytest.approx(measured, rel=0.1)


def losses_here(tables, alone, most):
    """Losses of three steps; `alone`: as a rank alone is, else by FSDP on one shard.

    Up to `most` blocks are one graph.
    """
    config = config_from_tables(tables, "in a test")
    is_alone = fsdp.is_alone if alone else lambda *_: False
    with (
        mock.patch.object(parallel_model, "is_alone", is_alone),
        mock.patch.dict(graphs.MOST_BLOCKS, {DEVICE.type: most}),
    ):
        trainer = build_trainer(config, connection.start(config.parallelism))
    losses = []
    for _ in range(3):
        loss, _ = trainer.train_step()
        losses.append(loss.item())
    trainer.loader.close()
    trainer.checkpointer.saver.release()
    return losses


def losses_of_each(cases):
    return [losses_here(*case) for case in cases]


def test_a_rank_alone_computes_what_fsdp_on_one_shard_does(tmp_path):
    """Copies are written and gradients taken in time, by block and in graphs of several blocks."""
    write_text(tmp_path)
    training = {"dtype": "bfloat16", "microbatch_size": 4, "steps": 3, "compile": False}
    shape = sized({"n_layer": 4, "n_head": 4, "n_embd": 256}, {"n_layer": 2})
    schedule = {"name": "constant", "warmup_steps": 0}
    optimizer = {"lr": 1e-3}  # with which the loss falls from the first step on
    tables = {"training": training, "schedule": schedule, "optimizer": optimizer}
    eager = tiny_tables(tmp_path, model=shape, **tables)
    compiled = eager | {"training": eager["training"] | {"compile": True}}
    cases = [(eager, False, 1), (eager, True, 1)]
    cases += [(compiled, True, most) for most in sized((1, 2, 16), ())]
    [(expected, alone, *others)] = run_ranks(losses_of_each, 1, cases)
    assert expected[2] < expected[0]
    assert alone == pytest.approx(expected, rel=1e-3)
    for losses in others:
        assert losses == pytest.approx(expected, rel=5e-3)


def prefetched_and_not(tables):
    """Gradients of a batch prefetched while the device worked, and of the same one at once."""
    config = config_from_tables(tables, "in a test")
    trainer = build_trainer(config, connection.start(config.parallelism))
    model, found = trainer.model, []
    for prefetched in (True, False):
        busy = torch.randn(sized(4096, 16), sized(4096, 16), device=DEVICE)
        batch = trainer.loader.peek()
        batch = [windows.pin_memory() if ON_GPU else windows for windows in batch]
        for _ in range(50):
            busy = busy @ busy / 64
        if prefetched:
            with without_waiting():
                model.batches.prefetch(batch)
        assert (model.batches.prefetched[0] is batch) == prefetched
        loss = model.backward(batch)
        found.append([loss, *(weight.grad for weight in model.weights.values())])
        trainer.optimizer.zero_grad()
    return [[value.cpu() for value in values] for values in found]


def test_a_batch_is_prefetched_while_the_device_works(tmp_path):
    write_text(tmp_path)
    data = {"separate_documents": True}
    [found] = run_ranks(prefetched_and_not, 1, tiny_tables(tmp_path, data=data))
    for prefetched, direct in zip(*found):
        assert torch.equal(prefetched, direct)
