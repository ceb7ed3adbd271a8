"""Several ranks on one GPU, which exchange tensors by gloo, against one rank.

NCCL refuses two ranks on a GPU. What travels is the same.
"""

import time
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from tests.gpu.device import DEVICE, ON_GPU, sized
from tests.support.layouts import LAYOUTS
from tests.support.ranks import run_ranks
from torchmars.config import (
    ActivationCheckpointConfig,
    ParallelismConfig,
    TrainingConfig,
    model_config,
)
from torchmars.models import build_meta_model
from torchmars.optim import MARS, param_groups
from torchmars.parallel.layout import Layout
from torchmars.parallel.parallel_model import ParallelModel

# Without tp and the ring of cp: gloo of torch 2.11 dies where it gathers tensors of a GPU for them.
NAMES = ["FSDP 2", "HSDP 2x2", "FSDP 4", "CP 2 Ulysses"]
STEPS, BATCH, LENGTH, VOCABULARY = sized((5, 8, 512, 4096), (2, 4, 16, 64))
SHAPE = sized({"n_layer": 4, "n_head": 8, "n_embd": 512}, {"n_layer": 1, "n_head": 4, "n_embd": 32})


def rows() -> Iterator[dict[str, Any]]:
    """Yield how far each layout's losses are from those of one rank, with two kinds of rules."""
    for rule in ("mars-adamw", "mars-m"):
        [(alone, _)] = run_ranks(losses_of, 1, rule, {})
        for name in sized(NAMES, NAMES[:3] if rule == "mars-m" else []):
            size, settings = LAYOUTS[name]
            began = time.monotonic()
            losses, seconds = run_ranks(losses_of, size, rule, settings)[0]
            yield {
                "rule": rule,
                "layout": name,
                "ranks": size,
                "largest relative difference": max(
                    abs(one - other) / other for one, other in zip(losses, alone)
                ),
                "losses": losses,
                "s a step": seconds,
                "s in all": time.monotonic() - began,
            }


def losses_of(rule: str, settings: dict[str, Any]) -> tuple[list[float], float]:
    """Train for some steps; return the mean loss of each, and the seconds of the last one."""
    if ON_GPU:
        torch.cuda.set_device(0)
        torch.zeros(1, device=DEVICE)  # else a mesh takes the GPU of each rank's own number
    device = torch.device("cuda", 0) if ON_GPU else torch.device("cpu")
    parallelism = ParallelismConfig(**settings)
    layout = Layout.create(device, parallelism.degrees(torch.distributed.get_world_size()))
    training = TrainingConfig(
        global_batch_size=BATCH, seq_len=LENGTH, dtype="float32", compile=False
    )
    config = model_config(name="gpt2", size="small", **SHAPE)
    whole = build_meta_model(config, VOCABULARY, LENGTH)
    model = ParallelModel(
        whole, parallelism, training, ActivationCheckpointConfig(), layout, device
    )
    for module in model.parts[0].modules():
        if isinstance(module, FSDPModule):  # gloo has no sum that divides
            module.set_force_sum_reduction_for_comms(True)
    model.init_weights(0)
    groups = param_groups(whole, rule, lr=1e-3)
    for group in groups:
        group["params"] = [(name, model.weights[name]) for name, _ in group["params"]]
    optimizer = MARS(groups, max_grad_norm=1.0)
    windows = torch.randint(
        VOCABULARY, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(0)
    )
    own = windows.chunk(layout.data.size)[layout.data.rank]
    losses, began = [], 0.0
    for _ in range(STEPS):
        began = time.perf_counter()
        loss = model.backward([own])
        optimizer.step()
        model.follow_weights()
        optimizer.zero_grad()
        losses.append(layout.mean_loss(loss))
    return losses, time.perf_counter() - began
