"""FSDP2 and, over two axes, HSDP: weights in shards, gathered for compute."""

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from torchmars.parallel.part import Part


def shard(part: Part, mesh: DeviceMesh, dtype: torch.dtype, reshard: bool) -> None:
    """Shard `part` in place over `mesh`: one axis for FSDP, two (replicate, shard) for HSDP.

    Each of its blocks and the rest become a unit. Its float32 weights are gathered in `dtype` for
    compute, and its gradients are averaged over the ranks in float32. `reshard`: blocks free what
    they gathered after the forward pass, and gather it again for the backward pass.
    """
    # Hidden states are in `dtype` already, since the embedding's weights are. The other inputs of
    # blocks, such as the cosines of rotary positions, must stay as exact as they are.
    policy = MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    for block in part.model.blocks.values():
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(part, mesh=mesh, mp_policy=policy)


def reduce_gradients(part: Part, last: bool) -> None:
    """Let the next backward pass reduce gradients over the ranks on the `last` microbatch only."""
    if isinstance(part, FSDPModule):
        part.set_requires_gradient_sync(last)
        part.set_is_last_backward(last)
