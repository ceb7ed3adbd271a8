"""Runs on one GPU, under NCCL: restarts, signals, hangs, saves, and the memory of the plan."""

import os
import re
import signal
import subprocess
import sys

import pytest
import torch

from tests.gpu.device import DEVICE, without_waiting
from tests.support.commands import ROOT, finish, start
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
from torchmars.cluster import connection
from torchmars.config.load import config_from_tables
from torchmars.core.errors import EXIT_HUNG
from torchmars.training.trainer import build_trainer

pytestmark = pytest.mark.gpu

# A machine without a network may have some packages by PYTHONPATH alone.
WITH_ROOT = {"PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}


def test_a_run_in_bfloat16_goes_on_where_it_was_stopped(tmp_path):
    write_text(tmp_path)
    settings = {
        "training": {"dtype": "bfloat16", "steps": 3},
        "schedule": {"name": "constant"},
        "checkpoint": {"interval": 3},
    }
    losses = {}
    for name, steps in (("straight", ["6"]), ("stopped", ["3", "6"])):
        run = {"name": name}
        file = tmp_path / f"{name}.toml"
        write_config(tiny_config(tmp_path, run=run, **settings), file)
        for last in steps:
            code, out, err = finish(file, "--training.steps", last, NGPU="1")
            assert code == 0 and "(cuda, " in out and "bfloat16 compute" in out, err
        losses[name] = metrics(tiny_tables(tmp_path, run=run))
    assert list(losses["stopped"]) == [1, 2, 3, 4, 5, 6]
    assert losses["stopped"] == pytest.approx(losses["straight"], rel=1e-3)


def test_a_run_compiles_and_a_restart_finds_what_it_compiled(tmp_path, monkeypatch):
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)  # torch sets it where it compiles
    write_text(tmp_path)
    tables = tiny_tables(tmp_path, model={"n_layer": 1}, training={"steps": 4})
    write_config(config_from_tables(tables, "in a test"), tmp_path / "tiny.toml")
    cache, sizes = run_folder_of(tables) / "compile_cache", []
    for last in ("2", "4"):
        code, out, err = finish(tmp_path / "tiny.toml", "--training.steps", last, NGPU="1")
        assert code == 0 and "compiled blocks" in out, err
        sizes.append(len(list((cache / "fxgraph").glob("*/*"))))
    assert sizes[0] == sizes[1] > 0
    assert newest_config(checkpoints(run_folder_of(tables) / "checkpoints"))["training"]["compile"]


def test_a_signal_saves_and_a_dead_rank_is_started_again(tmp_path):
    write_text(tmp_path)
    tables = tiny_tables(tmp_path, training={"steps": 10**6, "compile": False})
    tables["checkpoint"] = {"interval": 5, "keep_last": 2}
    write_config(config_from_tables(tables, "in a test"), tmp_path / "tiny.toml")
    process = start(tmp_path / "tiny.toml", NGPU="1", MAX_RESTARTS="1")
    killed = False
    for line in process.stdout:
        if not killed and "checkpoint " in line and "step-" in line:
            [rank] = subprocess.run(
                ["pgrep", "-f", "-P", str(process.pid), "torchmars.train"],
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            ).stdout.split()
            os.kill(int(rank), signal.SIGKILL)
            killed = True
        if killed and "continue " in line:
            process.send_signal(signal.SIGTERM)
            break
    out, err = process.communicate(timeout=300)
    assert process.returncode == 75, err
    step = int(re.search(r"stopped   by SIGTERM after step (\d+), saved", out)[1])
    assert checkpoints(run_folder_of(tables) / "checkpoints")[-1].name == f"step-{step:08d}"


HANGS = """
import time, torchmars.cluster.watchdog
from torchmars.parallel.parallel_model import ParallelModel
from torchmars.train import main

torchmars.cluster.watchdog.GRACE_SECONDS = 1.0
original, calls = ParallelModel.backward, []

def backward(self, *args):
    calls.append(1)
    if len(calls) == 4:
        time.sleep(10000)
    return original(self, *args)

ParallelModel.backward = backward
main()
"""


def test_a_rank_that_hangs_leaves_the_flight_recorder_of_nccl(tmp_path):
    write_text(tmp_path)
    tables = tiny_tables(tmp_path, guards={"hang_seconds": 60.0}, training={"compile": False})
    write_config(config_from_tables(tables, "in a test"), tmp_path / "tiny.toml")
    (tmp_path / "hangs.py").write_text(HANGS)
    ended = subprocess.run(
        [sys.executable, str(tmp_path / "hangs.py"), str(tmp_path / "tiny.toml")],
        cwd=tmp_path,
        env=os.environ | WITH_ROOT,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == EXIT_HUNG
    assert "in backward" in ended.stderr and "the last was nccl:" in ended.stderr
    assert (run_folder_of(tables) / "hang" / "flight_0").stat().st_size > 1000


@pytest.fixture
def trainer(tmp_path):
    write_text(tmp_path)
    training = {"dtype": "bfloat16", "seq_len": 256, "microbatch_size": 8, "compile": False}
    shape = {"n_layer": 4, "n_head": 4, "n_embd": 256, "vocab_size": 4096}
    config = tiny_config(tmp_path, model=shape, training=training)
    yield build_trainer(config, connection.start(config.parallelism))
    connection.stop()


def test_a_step_of_the_whole_model_does_not_wait_for_the_device(trainer):
    batch = [window.to(DEVICE) for window in trainer.loader.step()]
    for step in range(3):
        if step < 2:  # the first ones make gradients, state and streams
            trainer.model.backward(batch)
            trainer.optimizer.step()
        else:
            with without_waiting():
                trainer.model.backward(batch)
                trainer.optimizer.step()
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
        first, second = (each[name].to_local() for each in copies)
        assert first.is_pinned() and first.data_ptr() == second.data_ptr()
        assert torch.equal(second, weight.to_local().cpu())


PEAK = """
import sys, torch
from torchmars.config.load import load_config
from torchmars.cluster import connection
from torchmars.training.trainer import build_trainer

config = load_config(sys.argv[1:], "test")
trainer = build_trainer(config, connection.start(config.parallelism))
batch = trainer.loader.step()
for _ in range(2):
    trainer.model.backward(batch)
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()
torch.cuda.reset_peak_memory_stats()
trainer.model.backward(batch)
trainer.optimizer.step()
print(torch.cuda.max_memory_allocated())
"""
PLAN = """
import sys
from torchmars.config.load import load_config
from torchmars.planning.plan import make_plan

print(make_plan(load_config(sys.argv[1:], "test"), 1, 1).simulation.peak)
"""


def test_the_peak_of_the_plan_is_that_of_a_step(tmp_path):
    write_text(tmp_path, documents=400)
    training = {"dtype": "bfloat16", "seq_len": 512, "microbatch_size": 8, "compile": False}
    shape = {"n_layer": 6, "n_head": 8, "n_embd": 512, "vocab_size": 16384}
    write_config(tiny_config(tmp_path, model=shape, training=training), tmp_path / "tiny.toml")
    measured, planned = (
        int(
            subprocess.run(
                [sys.executable, "-c", program, str(tmp_path / "tiny.toml")],
                env=os.environ | WITH_ROOT,
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            ).stdout.split()[-1]
        )
        for program in (PEAK, PLAN)
    )
    assert planned == pytest.approx(measured, rel=0.1)


def prefetched_and_not(tables):
    """Gradients of a batch prefetched while the device worked, and of the same one at once."""
    config = config_from_tables(tables, "in a test")
    trainer = build_trainer(config, connection.start(config.parallelism))
    model, found = trainer.model, []
    for prefetched in (True, False):
        busy = torch.randn(4096, 4096, device="cuda")
        batch = [windows.pin_memory() for windows in trainer.loader.peek()]
        for _ in range(50):
            busy = busy @ busy / 64
        torch.cuda.set_sync_debug_mode("error")
        try:
            if prefetched:
                model.batches.prefetch(batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert (model.batches.prefetched[0] is batch) == prefetched
        loss = model.backward(batch)
        found.append([loss, *(weight.grad.to_local() for weight in model.weights.values())])
        trainer.optimizer.zero_grad()
    return [[value.cpu() for value in values] for values in found]


def test_a_batch_is_prefetched_while_the_device_works(tmp_path):
    write_text(tmp_path)
    data = {"separate_documents": True, "num_workers": 0}
    [found] = run_ranks(prefetched_and_not, 1, tiny_tables(tmp_path, data=data))
    for prefetched, direct in zip(*found):
        assert torch.equal(prefetched, direct)
