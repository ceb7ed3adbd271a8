"""Where layers, sequences and blocks are cut over ranks: numbers, known before there are ranks.

What cuts them (tensor.py, context.py, pipeline.py) imports seconds of torch that a launcher does
not need.
"""

import math

from torch import nn

from torchmars.config import ParallelismConfig
from torchmars.core.errors import UserError
from torchmars.models import Model
from torchmars.models.model import TensorParallelCut


def cut_sizes(model: Model) -> dict[str, int]:
    """Return the sizes that the ranks have to divide, by their names in words."""
    sizes = {}
    for name, module in model.named_modules():
        cut = cut_of(name, model.cuts)
        if cut not in (None, "positions", "whole"):
            weight = module.get_parameter("weight")
            side, size = ("columns", weight.shape[1]) if cut == "columns" else ("rows", len(weight))
            sizes[f"{side} of {name}"] = size
    return sizes


def cut_of(name: str, cuts: dict[str, TensorParallelCut]) -> TensorParallelCut | None:
    """Return how the module called `name` is cut."""
    return next((cut for end, cut in cuts.items() if name.endswith(end)), None)


def sequence_unit(cp: int, tp: int) -> int:
    """Return the unit of the length of sequences: its multiples give all ranks equal parts."""
    return tp if cp == 1 else math.lcm(2 * cp, cp * tp)


def blocks_of_stages(model: Model, parallelism: ParallelismConfig) -> list[range]:
    """Return the numbers of the blocks of each stage of a pipeline.

    The stages follow `parallelism.pp_blocks`, or else are cut so that the costliest is as cheap as
    can be. Raises `UserError` for more stages than blocks, and for blocks that do not add up.
    """
    blocks, stages = len(model.blocks), parallelism.stages
    if parallelism.pp_blocks is not None and sum(parallelism.pp_blocks) != blocks:
        raise UserError(
            f"parallelism.pp_blocks = {list(parallelism.pp_blocks)} deals out "
            f"{sum(parallelism.pp_blocks)} blocks, the model has {blocks}"
        )
    if blocks < stages:
        raise UserError(
            f"{stages} pipeline stages cannot share {blocks} blocks: lower parallelism.pp = "
            f"{parallelism.pp}"
        )
    counts = parallelism.pp_blocks or even_counts(blocks, stages, head_in_blocks(model))
    starts = [sum(counts[:stage]) for stage in range(stages + 1)]
    return [range(first, last) for first, last in zip(starts, starts[1:])]


def head_in_blocks(model: Model) -> float:
    """Return the FLOPs of the head of a whole model over the FLOPs of a block."""
    head = 6 * model.vocab_rows * model.width  # for each token
    return head * len(model.blocks) / (model.flops_per_token() - head)


def even_counts(blocks: int, stages: int, head: float) -> list[int]:
    """Return how many blocks each stage gets, at least one.

    The costliest stage is as cheap as can be. The last one also has the head, which costs `head`
    blocks. Looking up an embedding costs nothing. Blocks are taken to cost alike: a dense first
    block of GLM-4.5 has 0.92 of the FLOPs of one with experts.
    """
    costs = [1.0] * (stages - 1) + [1.0 + head]
    for _ in range(blocks - stages):
        costs[costs.index(min(costs))] += 1
    return [round(cost) for cost in [*costs[:-1], costs[-1] - head]]


def stage_ranks(parallelism: ParallelismConfig) -> list[int]:
    """Return which rank of the pipeline has each stage."""
    return [stage % parallelism.pp for stage in range(parallelism.stages)]


def cut_model(model: Model, blocks: range, first: bool, last: bool) -> None:
    """Remove the layers of other stages from `model`, in place.

    A token table that is the head too stays in the first and in the last stage.
    """
    model.blocks = nn.ModuleDict({str(number): model.blocks[str(number)] for number in blocks})
    for name in model.inputs:
        if not first and not (last and name == "tok_embed" and model.output is None):
            setattr(model, name, None)
    if not last:
        for name in ("norm", "output"):
            setattr(model, name, None)
