"""Where layers, sequences and blocks are cut over ranks: numbers, known before there are ranks.

What cuts them (tensor.py, context.py, pipeline.py) imports seconds of torch that a launcher does
not need.
"""

import functools
import math
from collections import defaultdict
from collections.abc import Sequence

from torch import nn

from torchmars.config import ParallelismConfig
from torchmars.core.errors import UserError
from torchmars.models import Model
from torchmars.models.model import TensorParallelCut

# On CPUs a collective keeps the rank waiting: models up to this size are gathered at once.
ONE_UNIT_BYTES = 32 * 2**20
# Neighbouring blocks are one unit while what is gathered of them is no larger, by the type of the
# device. On GPUs a collective of less reaches no full speed, and the hooks of a unit take the host
# 0.5 ms a step: GPT-2 small would have thirteen. Larger units hide less, and take memory. On CPUs
# what is larger than one unit gains nothing from fewer.
UNIT_BYTES = defaultdict(lambda: 64 * 2**20, cpu=0)
# The logits of a chunk of the loss are at most so many, by the type of the device, but those of at
# least FEWEST_TOKENS tokens. docs/parallelism.md has the measurements.
MOST_LOGITS = defaultdict(lambda: 2**28, cpu=2**24)
FEWEST_TOKENS = 256


def chunk_tokens(device: str, rows: int) -> int:
    """Return how many tokens a chunk of the loss has at most, where a rank has `rows` of the head.

    The rule knows sizes and the type of the device only. So a run that resumes computes the same.
    """
    return max(MOST_LOGITS[device] // rows, FEWEST_TOKENS)


def is_one_unit(size: int, device: str, parallelism: ParallelismConfig) -> bool:
    """Return whether a part is gathered and reduced as a whole, once for each microbatch.

    That is so on CPUs, where all its weights in the compute dtype have at most `ONE_UNIT_BYTES`,
    without a pipeline, and unless `reshard_after_forward` says what blocks do.
    """
    decides = parallelism.reshard_after_forward == "auto" and parallelism.pp == 1
    return decides and device == "cpu" and size <= ONE_UNIT_BYTES


def together(sizes: Sequence[int], most: int) -> list[list[int]]:
    """Return the places of neighbours that are gathered together, of at most `most` in sum.

    What is larger is alone.
    """
    units: list[list[int]] = []
    left = 0
    for place, size in enumerate(sizes):
        if size > left or not units:
            units.append([])
            left = most
        units[-1].append(place)
        left -= size
    return units


@functools.lru_cache(maxsize=1)  # of a search through thousands of layouts of one model
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

    The costliest stage is as cheap as can be. Raises `UserError` for more stages than blocks.
    """
    blocks, stages = len(model.blocks), parallelism.stages
    if blocks < stages:
        single = ', or choose parallelism.pp_schedule = "1F1B", which has one stage a rank'
        raise UserError(
            f"{stages} pipeline stages cannot share {blocks} blocks: lower parallelism.pp = "
            f"{parallelism.pp}{single if parallelism.pp <= blocks else ''}"
        )
    counts = even_counts(blocks, stages, head_in_blocks(model))
    starts = [sum(counts[:stage]) for stage in range(stages + 1)]
    return [range(first, last) for first, last in zip(starts, starts[1:])]


@functools.lru_cache(maxsize=1)  # likewise
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
