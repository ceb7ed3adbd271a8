"""The memory of a plan against that of real runs, on every rank."""

import ctypes
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tests.support.even_routing import MIXTURE, route_evenly
from tests.support.full import FULL, full_but
from tests.support.ranks import run_ranks
from tests.support.tiny import tiny_tables, write_text
from torchmars.cluster import connection
from torchmars.config.load import config_from_tables
from torchmars.planning.memory import MemoryCounter
from torchmars.planning.plan import plan_rank
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
    dist.destroy_process_group()
    simulation = plan_rank(config_from_tables(tables, "in a test"), size, 0, rank).simulation
    planned = (
        {name: getattr(simulation, name) for name in measured[0]},
        simulation.activations + simulation.gathered,
    )
    return planned, measured


# 1004 rows do not divide over 8 ranks, and 4 x 136 do.
MODEL = {"n_layer": 4, "n_embd": 136, "n_head": 4, "vocab_size": 1004}
MARS_M = {"name": "mars-m"}
NARROW = {"momentum_dtype": "bfloat16"}
SLOW = pytest.mark.slow
VARIANTS = [
    pytest.param(MARS_M, {}, {}, id="fsdp4", marks=SLOW),
    pytest.param(MARS_M, {}, {"tp": 2}, id="fsdp2-tp2", marks=FULL),
    pytest.param(MARS_M, {}, {"pp": 2}, id="pp2-fsdp2", marks=FULL),
    pytest.param(MARS_M | NARROW, {}, {"cp": 2}, id="cp2-fsdp2", marks=SLOW),
    pytest.param(
        {"name": "mars-adamw", "mode": "exact"},
        {"dtype": "bfloat16"},
        {"dp_replicate": 2},
        id="hsdp2x2-exact",
        marks=SLOW,
    ),
    pytest.param(MARS_M, {}, {"tp": 4}, id="tp4", marks=SLOW),
    pytest.param(MARS_M, {}, {"pp": 2, "tp": 2}, id="pp2-tp2", marks=SLOW),
    *(
        pytest.param(MARS_M, {}, {"pp": 2, "pp_schedule": name}, id=f"pp2-{name}", marks=SLOW)
        for name in ("GPipe", "Interleaved1F1B")
    ),
]


needs_linux = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="needs Linux to measure the peak of memory"
)


@needs_linux
def test_memory_is_that_of_a_short_run(tmp_path):
    check_memory(tmp_path, MARS_M, {"global_batch_size": 8, "seq_len": 256}, {}, ranks=2)


@needs_linux
@pytest.mark.parametrize("optimizer,training,parallelism", VARIANTS)
def test_memory_is_that_of_a_real_run(tmp_path, optimizer, training, parallelism):
    check_memory(tmp_path, optimizer, training, parallelism)


@needs_linux
@pytest.mark.parametrize(
    "training",
    [
        pytest.param({"dtype": "bfloat16", "global_batch_size": 4, "seq_len": 64}, marks=FULL),
        pytest.param({"dtype": "float32", "global_batch_size": 8}, marks=SLOW),
    ],
    ids=str,
)
def test_memory_of_a_rank_alone(tmp_path, training):
    """Wide blocks and few tokens: weights, copies and gradients are most of it."""
    wide = MODEL | {"n_embd": 272, "n_layer": 6}
    check_memory(tmp_path, {"name": "adamw"}, training, {}, ranks=1, model=wide)


@needs_linux
@pytest.mark.slow
@pytest.mark.parametrize("parallelism", [{}, {"cp": 2}, {"pp": 2}, {"tp": 2}])
def test_memory_with_documents_apart(tmp_path, parallelism):
    check_memory(tmp_path, MARS_M, {}, parallelism, data={"separate_documents": True})


SHORT = {"global_batch_size": 8, "seq_len": 256}


@needs_linux
@pytest.mark.parametrize(
    "ranks,training,parallelism,mode",
    [
        pytest.param(2, SHORT, {"ep": 2}, "none", id="ep2-short", marks=FULL),
        pytest.param(4, {}, {"ep": 2}, "none", id="fsdp4-ep2", marks=SLOW),
        pytest.param(4, {}, {"tp": 2, "ep": 4}, "none", id="fsdp2-tp2-ep4", marks=SLOW),
        pytest.param(4, {}, {"pp": 2, "ep": 2}, "none", id="pp2-ep2", marks=SLOW),
        pytest.param(4, {}, {"tp": 2}, "none", id="fsdp2-tp2", marks=SLOW),
        pytest.param(4, {}, {"ep": 4}, "full", id="ep4-full", marks=SLOW),
        pytest.param(4, {}, {"ep": 4}, "selective", id="ep4-selective", marks=SLOW),
    ],
)
def test_memory_of_experts(tmp_path, ranks, training, parallelism, mode):
    """Where routers choose one expert as often as another."""
    check_memory(
        tmp_path,
        MARS_M,
        training,
        parallelism,
        ranks,
        model=MIXTURE,
        activation_checkpoint={"mode": mode},
    )


LATENT = {"name": "deepseek", "vocab_size": 1004}


@needs_linux
@pytest.mark.parametrize(
    "parallelism", full_but([], [{"ep": 2}, {"tp": 2}, {"cp": 2}], [{"ep": 2}, {"tp": 2}]), ids=str
)
def test_memory_of_latent_attention(tmp_path, parallelism):
    check_memory(tmp_path, MARS_M, {}, parallelism, ranks=2, model=LATENT)


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
    for (planned, planned_peak), (measured, measured_peak) in run_ranks(
        planned_and_measured, ranks, tables
    ):
        assert planned == measured
        assert planned_peak == pytest.approx(measured_peak, rel=0.2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_copy_that_a_softmax_makes_is_counted(dtype):
    with MemoryCounter() as counter:
        logits = torch.zeros(4, 1000, dtype=dtype)
        torch.softmax(logits, -1, dtype=torch.float32, out=torch.empty(4, 1000))
    own = logits.nbytes + 4 * 1000 * 4
    with torch.profiler.profile(profile_memory=True) as profile:
        torch.softmax(logits, -1, dtype=torch.float32, out=torch.empty(4, 1000))
    made = sum(max(each.self_cpu_memory_usage, 0) for each in profile.key_averages())
    assert counter.moments[""].total() == own + made - 4 * 1000 * 4
