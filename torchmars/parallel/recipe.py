"""The one recipe that puts a plain model on a layout, from outside: models know none of it."""

from dataclasses import replace

import torch
from torch import nn

from torchmars.config import ActivationCheckpointConfig, ParallelismConfig, TrainingConfig
from torchmars.models.moe import MoE
from torchmars.parallel.activations import checkpoint_blocks
from torchmars.parallel.context import share_sequences
from torchmars.parallel.experts import deal_out_experts
from torchmars.parallel.float8 import convert_layers
from torchmars.parallel.fsdp import is_alone, shard
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
    that is asked for. Its weights are sharded, unless the rank is alone. It computes in `training.dtype`, which is resolved;
    weights stay float32.
    """
    model, alone = part.model, is_alone(layout, parallelism)
    if layout.expert_mesh is not None:
        deal_out_experts(model, layout)
    if layout.group("tp").size > 1:
        cut_layers(model, layout.tensor_mesh)
    if layout.group("cp").size > 1:
        share_sequences(model, layout.group("cp").process_group, parallelism.cp_method)
    # A rank alone gathers nothing.
    float8 = replace(training.float8, all_gather=False) if alone else training.float8
    convert_layers(model, float8, layout.device)
    checkpoint_blocks(model, activations, layout.expert_mesh is not None)
    if training.compile:
        for block in model.blocks.values():
            for module in compiled_modules(block, whole=layout.expert_mesh is None):
                module.compile()
    if not alone:
        shard(part, layout, getattr(torch, training.dtype), parallelism)


def compiled_modules(block: nn.Module, whole: bool) -> list[nn.Module]:
    """Return what of a block is compiled: all of it or, unless `whole`, all but its experts.

    Rows that travel to experts are as many as a router decides: no graph goes on past them.
    """
    if whole or not isinstance(block.mlp, MoE):
        return [block]
    return [module for module in block.children() if not isinstance(module, MoE)]
