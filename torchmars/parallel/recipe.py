"""The one recipe that puts a plain model on a layout, from outside: models know none of it."""

import torch

from torchmars.models import Model
from torchmars.parallel.fsdp import shard
from torchmars.parallel.layout import Layout


def parallelize(model: Model, layout: Layout, dtype: torch.dtype, compile: bool) -> None:
    """Compile the blocks of `model` if asked to, then shard it, in place.

    It computes in `dtype`; its weights stay float32.
    """
    if compile:
        for block in model.blocks.values():
            block.compile()
    shard(model, layout.shard_mesh, dtype)
