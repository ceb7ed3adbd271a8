"""FSDP2 and, over two axes, HSDP: weights in shards, gathered for compute."""

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from torchmars.models import Model


def shard(model: Model, mesh: DeviceMesh, dtype: torch.dtype) -> None:
    """Shard `model` in place over `mesh`: one axis for FSDP, two (replicate, shard) for HSDP.

    Each of `model.blocks` and the rest become a unit. Its float32 weights are gathered in `dtype`
    for compute, and its gradients are averaged over the ranks in float32.
    """
    # Hidden states are in `dtype` already, since the embedding's weights are. The other inputs of
    # blocks, such as the cosines of rotary positions, must stay as exact as they are.
    policy = MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    for block in model.blocks.values():
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def reduce_gradients(model: Model, last: bool) -> None:
    """Let the next backward pass reduce gradients over the ranks on the `last` microbatch only."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
        model.set_is_last_backward(last)
