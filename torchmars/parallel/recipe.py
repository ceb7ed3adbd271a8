"""The one recipe that puts a plain model on a layout, from outside: models know none of it."""

import torch

from torchmars.config import ActivationCheckpointConfig, ParallelismConfig, TrainingConfig
from torchmars.parallel.activations import checkpoint_blocks
from torchmars.parallel.context import share_sequences
from torchmars.parallel.float8 import convert_layers
from torchmars.parallel.fsdp import shard
from torchmars.parallel.layout import Layout
from torchmars.parallel.part import ModelPart
from torchmars.parallel.tensor import cut_layers


def parallelize(
    part: ModelPart,
    layout: Layout,
    parallelism: ParallelismConfig,
    training: TrainingConfig,
    activations: ActivationCheckpointConfig,
) -> None:
    """Put a part of a model on its ranks, in place.

    Its layers are cut over tp, its sequences over cp. Its blocks keep for the backward pass what
    `activations` says, compute in float8 and are compiled where that is asked for. Its weights are
    sharded. It computes in `training.dtype`, which is resolved; weights stay float32.
    """
    model = part.model
    if layout.group("tp").size > 1:
        cut_layers(model, layout.tensor_mesh)
    if layout.group("cp").size > 1:
        share_sequences(model, layout.group("cp").process_group, parallelism.cp_method)
    convert_layers(model, training.float8, layout.device)
    checkpoint_blocks(model, activations)
    if training.compile:
        for block in model.blocks.values():
            block.compile()
    dtype = getattr(torch, training.dtype)
    shard(part, layout.shard_mesh, layout.device, dtype, parallelism)
