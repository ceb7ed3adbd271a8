"""FSDP2 and, over two axes, HSDP: weights in shards, gathered for compute."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from torchmars.config import ParallelismConfig
from torchmars.parallel.part import ModelPart

# On CPUs a collective keeps the rank waiting: what is no larger is gathered at once.
ONE_UNIT_BYTES = 32 * 2**20


def shard(
    part: ModelPart,
    mesh: DeviceMesh,
    device: torch.device,
    dtype: torch.dtype,
    parallelism: ParallelismConfig,
) -> None:
    """Shard `part` in place over `mesh`: one axis for FSDP, two (replicate, shard) for HSDP.

    Each of its blocks and the rest become a unit. So do a token table and a head that are apart:
    then neither is gathered while blocks compute. The float32 weights are gathered in `dtype` for
    compute, and gradients are averaged over the ranks in float32. A small part on CPUs is one unit,
    see `is_one_unit`. `device` is what the ranks compute on: in a simulation the mesh is of CPUs.
    """
    model, blocks = part.model, parallelism.blocks_reshard(mesh.size(mesh.ndim - 1))
    part.keeps_gathered = blocks is False
    always = parallelism.reshard_after_forward == "always"
    on_gpu = mesh.device_type == "cuda"
    make_unit = partial(
        fully_shard,
        mesh=mesh,
        # Hidden states are in `dtype` already, since the embedding's weights are. The other inputs
        # of blocks, such as the cosines of rotary positions, must stay as exact as they are.
        mp_policy=MixedPrecisionPolicy(
            param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        ),
        offload_policy=(
            CPUOffloadPolicy(pin_memory=on_gpu) if parallelism.cpu_offload else OffloadPolicy()
        ),
    )
    if is_one_unit(part, device, dtype, parallelism):
        make_unit(part)
        return
    if model.output is not None:
        # The backward pass begins with the head.
        make_unit([model.norm, model.output], reshard_after_forward=always)
    tied = part.last and model.output is None
    if part.first and not tied:
        make_unit(model.tok_embed, reshard_after_forward=blocks)
    for block in model.blocks.values():
        make_unit(block, reshard_after_forward=blocks)
    make_unit(part, reshard_after_forward=always or None)


def is_one_unit(
    part: nn.Module, device: torch.device, dtype: torch.dtype, parallelism: ParallelismConfig
) -> bool:
    """Return whether a part is gathered and reduced as a whole, once for each microbatch.

    That is so on CPUs, where all its weights in `dtype` have at most `ONE_UNIT_BYTES`, without a
    pipeline, and unless `reshard_after_forward` says what blocks do.
    """
    size = sum(parameter.numel() for parameter in part.parameters()) * dtype.itemsize
    decides = parallelism.reshard_after_forward == "auto" and parallelism.pp == 1
    return decides and device.type == "cpu" and size <= ONE_UNIT_BYTES


def set_reduction(part: ModelPart, parallelism: ParallelismConfig, last: bool) -> None:
    """Set what the next backward pass does with gradients; `last`: of the last microbatch.

    Weights that a forward pass leaves gathered stay so until then.
    """
    assert isinstance(part, FSDPModule)
    kept = parallelism.accumulation
    part.set_requires_gradient_sync(last or kept != "whole")
    part.set_requires_all_reduce(last or kept == "reduced")
    part.set_reshard_after_backward(last or not part.keeps_gathered)
    part.set_is_last_backward(last)


def call_before_reduction_ends(loss: Tensor, call: Callable[[], None]) -> None:
    """Let the backward pass of `loss` call `call` when it has computed all gradients.

    What then remains of the pass is FSDP's: it reduces the gradients of the outermost unit, and
    waits for all reductions that are under way.
    """

    def queue(_: Tensor) -> None:
        # Private, torch 2.11 to 2.13. The engine keeps the order, and FSDP queues its own later.
        Variable._execution_engine.queue_callback(call)

    loss.register_hook(queue)


def weight_device(parallelism: ParallelismConfig, device: torch.device) -> torch.device:
    """Return where the weights of a rank that computes on `device` are, and so its optimizer."""
    return torch.device("cpu") if parallelism.cpu_offload else device
