"""The recipe that puts a plain model on the layout: compile, then FSDP2. Applied from outside; models know none of it."""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


def parallelize(model: nn.Module, mesh: DeviceMesh, dtype: torch.dtype, compile: bool) -> None:
    """Shard `model` in place over `mesh`: one dimension for FSDP, two (replicate, shard) for HSDP.

    Each of `model.blocks` and the rest become a unit whose float32 weights are gathered in `dtype` for compute and
    whose gradients are averaged over the ranks in float32.
    """
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for block in model.blocks:
        if compile:
            block.compile()
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def reduce_gradients(model: nn.Module, last: bool) -> None:
    """Whether the next backward reduces gradients over the ranks: on the `last` microbatch of a step only."""
    model.set_requires_gradient_sync(last)
    model.set_is_last_backward(last)
