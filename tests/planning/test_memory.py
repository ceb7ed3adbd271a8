"""The memory of a plan against that of real runs, on every rank."""

import ctypes
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tests.planning.even_routing import MIXTURE, route_evenly
from tests.support.full import FULL
from tests.support.ranks import run_ranks
from tests.support.tiny import tiny_tables, write_text
from torchmars.cluster import connection
from torchmars.config.load import config_from_tables
from torchmars.planning.plan import plan_run
from torchmars.training.build import build_trainer


def bytes_of(tensors):
    """Bytes that lie in memory, each once."""
    parts = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return sum(
        {
            part.untyped_storage().data_ptr(): part.untyped_storage().nbytes() for part in parts
        }.values()
    )


def resident(name):
    """A line of /proc/self/status, in bytes."""
    return 1024 * int(
        next(
            line.split()[1]
            for line in Path("/proc/self/status").read_text().splitlines()
            if line.startswith(name)
        )
    )


def measure(tables):
    """What this rank of a real run holds, and the most that its backward pass takes on top."""
    ctypes.CDLL(None).mallopt(
        -3, 65536
    )  # M_MMAP_THRESHOLD: freed memory goes back to the system at once, so that it can be measured
    config = config_from_tables(tables, "in a test")
    trainer = build_trainer(config, connection.start(config.parallelism))
    model, optimizer, batch = trainer.model, trainer.optimizer, trainer.loader.step()
    route_evenly(model)
    if optimizer.exact:
        model.backward(batch)
        optimizer.look_ahead()
        optimizer.zero_grad()
    model.backward(batch)
    gradients = bytes_of(parameter.grad for parameter in model.weights.values())
    optimizer.step()
    optimizer.zero_grad()
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # look for the peak anew from here
    model.backward(batch)
    copies = bytes_of(model.copies.copies) if model.copies else 0
    peak = resident("VmHWM") - before + copies  # which were there before
    state = [tensor for each in optimizer.state.values() for tensor in each.values()]
    state += optimizer.ahead.values()
    weights = {*model.weights.values()}
    weights.update(each for part in model.parts.values() for each in part.parameters())
    return {
        "weights": bytes_of(weights) - copies,
        "gradients": gradients,
        "optimizer_state": bytes_of(state),
    }, peak


def planned_and_measured(tables):
    """The plan of this rank and what it measures, in the order of `measure`."""
    rank, size = dist.get_rank(), dist.get_world_size()
    measured = measure(tables)
    plan = plan_run(config_from_tables(tables, "in a test"), size, 0)
    found = plan.ranks[rank * len(plan.ranks) // size]
    planned = {name: getattr(found, name) for name in measured[0]}
    return planned, found.activations + found.gathered, measured, rank


# 1004 rows do not divide over 8 ranks, and 4 x 136 do.
MODEL = {"n_layer": 4, "n_embd": 136, "n_head": 4, "vocab_size": 1004}
MARS_M = {"name": "mars-m"}
NARROW = {"momentum_dtype": "bfloat16"}
VARIANTS = [
    pytest.param({"dtype": "bfloat16"}, {"dp_replicate": 2}, id="hsdp2x2-exact", marks=FULL),
    pytest.param({}, {"tp": 2}, id="fsdp2-tp2", marks=FULL),
    pytest.param({}, {"pp": 2}, id="pp2-fsdp2", marks=FULL),
    pytest.param({}, {"cp": 2}, id="cp2-fsdp2", marks=pytest.mark.slow),
    pytest.param(
        {}, {"pp": 2, "pp_schedule": "Interleaved1F1B"}, id="interleaved", marks=pytest.mark.slow
    ),
]


needs_linux = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="needs Linux to measure the peak of memory"
)


@needs_linux
def test_memory_is_that_of_a_short_run(tmp_path):
    check_memory(tmp_path, MARS_M, {"global_batch_size": 8, "seq_len": 256}, {}, ranks=2)


@needs_linux
@pytest.mark.parametrize("training,parallelism", VARIANTS)
def test_memory_is_that_of_a_real_run(tmp_path, training, parallelism):
    exact = {"name": "mars-adamw", "mode": "exact"}
    rule = exact if "dp_replicate" in parallelism else MARS_M
    check_memory(tmp_path, rule, training, parallelism)


@needs_linux
@FULL
def test_memory_of_a_rank_alone(tmp_path):
    """Wide blocks and few tokens: weights, copies and gradients are most of it."""
    wide = MODEL | {"n_embd": 272, "n_layer": 6}
    training = {"dtype": "bfloat16", "global_batch_size": 4, "seq_len": 64}
    check_memory(tmp_path, {"name": "adamw"}, training, {}, ranks=1, model=wide)


@needs_linux
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_memory_of_experts(tmp_path, mode):
    """Where routers choose one expert as often as another."""
    sections = {"model": MIXTURE, "activation_checkpoint": {"mode": mode}}
    check_memory(tmp_path, MARS_M, {}, {"ep": 4}, **sections)


@needs_linux
@FULL
def test_memory_of_latent_attention_with_documents_apart(tmp_path):
    model, data = {"name": "deepseek", "vocab_size": 1004}, {"separate_documents": True}
    check_memory(tmp_path, MARS_M, {}, {}, ranks=2, model=model, data=data)


def check_memory(tmp_path, optimizer, training, parallelism, ranks=4, **sections):
    """Compare the plan with a run."""
    write_text(tmp_path)
    tables = tiny_tables(
        tmp_path,
        optimizer=optimizer,
        training={"global_batch_size": 32, "microbatch_size": 4, "seq_len": 512} | training,
        parallelism=parallelism,
        **({"model": MODEL} | sections),
    )
    for planned, planned_peak, (measured, measured_peak), rank in run_ranks(
        planned_and_measured, ranks, tables
    ):
        if rank == 0:  # the shards of others may be smaller
            assert planned == measured
        assert planned_peak == pytest.approx(measured_peak, rel=0.2)
