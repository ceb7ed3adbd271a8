"""The one recipe that puts a plain model on a layout, from outside: models know none of it."""

import torch

from torchmars.config import ActivationCheckpointConfig, ParallelismConfig, TrainingConfig
from torchmars.parallel.activations import checkpoint_blocks
from torchmars.parallel.context import share_sequences
from torchmars.parallel.experts import deal_out_experts
from torchmars.parallel.float8 import convert_layers
from torchmars.parallel.fsdp import is_alone, shard
from torchmars.parallel.graphs import compile_blocks
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

    Its experts are dealt out over ep, its layers are cut over tp, its sequences over cp. Its blocks
    keep for the backward pass what `activations` says, compute in float8 and are compiled where
    that is asked for. Its weights are sharded, unless the rank is alone. It computes in
    `training.dtype`, which is resolved; weights stay float32.
    """
    model, alone = part.model, is_alone(layout, parallelism)
    if layout.expert_mesh is not None:
        deal_out_experts(model, layout)
    if layout.group("tp").size > 1:
        cut_layers(model, layout.weight_mesh["tp"])
    if layout.group("cp").size > 1:
        share_sequences(model, layout.group("cp").process_group, parallelism.cp_method)
    convert_layers(model, training.float8, layout.device)
    checkpoint_blocks(model, activations, layout.expert_mesh is not None)
    if training.compile:
        compile_blocks(model, layout, activations, alone)
    if not alone:
        shard(part, layout, getattr(torch, training.dtype), parallelism)
