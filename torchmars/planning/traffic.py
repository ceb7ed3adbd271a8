"""What a rank sends in a step, by formula, and which rank owns which matrices.

Volumes are those of the best known algorithms, rings: Thakur et al. 2005. Those of FSDP are as in
Rajbhandari et al. 2020 (arXiv 1910.02054), section 7.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from torchmars.config import Degrees
from torchmars.optim import MARS
from torchmars.optim.matrices.exchange import OwnerLoads
from torchmars.optim.matrices.orthogonal import ORTHOGONALIZERS
from torchmars.optim.matrices.owners import Bucket, plan_buckets, rank_bucket
from torchmars.optim.matrices.shapes import MatrixShape, extents_of_shards
from torchmars.optim.meshes import MeshPlace, ranks_along
from torchmars.optim.rules import RULES, MatrixRule
from torchmars.optim.settings import CUT
from torchmars.planning.memory import ROWS, LayoutMemory, Stage, Weight, Weights, entries_of

PASSES, OPTIMIZER = "forward and backward", "optimizer"
AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")  # from the outermost to the innermost


class Sent(NamedTuple):
    """What a rank sends in a step, of one kind."""

    phase: str
    operation: str
    group: Sequence[int]
    """The ranks that take part."""
    times: int
    size: float
    """Bytes."""
    waited: bool = False
    """Whether layers wait for it. FSDP and pipelines send while the rank computes."""


def groups_of(degrees: Degrees, pp_rank: int) -> dict[str, range]:
    """Return the groups that the first rank of a pipeline's rank `pp_rank` is in."""
    pp, dp_replicate, dp_shard, cp, tp, ep = degrees
    inner = dp_shard * cp * tp
    stage = dp_replicate * inner
    steps = {
        "tp": (1, tp),
        "cp": (tp, cp),
        "fsdp": (tp, dp_shard * cp),
        "dp_replicate": (inner, dp_replicate),
        "ep": (1, ep),
        "expert_fsdp": (ep, inner // ep),
        "stage": (1, stage),
    }
    first, pipeline = pp_rank * stage, range(0, pp * stage, stage)
    groups = {name: range(first, first + step * n, step) for name, (step, n) in steps.items()}
    return groups | {"pp": pipeline}


def axes_of(group: Sequence[int], degrees: Degrees) -> str:
    """Return the names of the axes of the mesh along which the ranks of a group differ."""
    names, step = list[str](), 1
    for axis in reversed(AXES):
        size = getattr(degrees, axis)
        names[:0] = [axis] if len({rank // step % size for rank in group}) > 1 else []
        step *= size
    return ", ".join(names) or "none"


OF_LAYERS = ("tp", "cp", "ep", "stage")  # groups that layers wait for
# The operation, the name of the group, how often, and the bytes of whole tensors.
Kind = tuple[str, str, int, float]


def traffic_of(memory: LayoutMemory, rank: int) -> list[Sent]:
    """Return what the first rank of a rank of the pipeline sends in the passes of a step."""
    groups, count = groups_of(memory.degrees, rank), Counter[tuple[str, str]]()
    sent: dict[tuple[str, str], float] = defaultdict(float)
    for number in memory.own[rank]:
        part = memory.parts[number]
        kinds = *of_weights(memory, part), *of_stage(memory, number), *of_layers(memory, part)
        for operation, name, times, size in kinds:
            n = len(groups[name])
            ring = {"send": 1.0, "all-reduce": 2 * (n - 1) / n}.get(operation, (n - 1) / n)
            count[operation, name] += times
            sent[operation, name] += ring * size
    return [
        Sent(PASSES, operation, groups[name], times, sent[operation, name], name in OF_LAYERS)
        for (operation, name), times in count.items()
        if times and len(groups[name]) > 1
    ]


def microbatches_of(memory: LayoutMemory) -> tuple[int, int]:
    """Return how many microbatches pass in a step, and how often all do: in exact mode twice."""
    passes = memory.config.optimizer.passes
    return memory.microbatches * passes, passes


def of_weights(memory: LayoutMemory, part: Stage) -> Iterator[Kind]:
    """Yield what FSDP sends of the weights of a part, and of their gradients."""
    if memory.alone:
        return
    (every, passes), b = microbatches_of(memory), memory.costs.itemsize
    accumulate, groups = memory.parallelism.accumulate, groups_of(memory.degrees, 0)
    scattered = passes if accumulate == "whole" else every
    exchanged = every if accumulate == "reduced" else passes
    reshards = memory.parallelism.blocks_reshard(len(groups["fsdp"]))
    gathers = 2 * every if reshards else passes
    of_ends = min(gathers, every) if memory.costs.tied else gathers
    for units, times, group in (
        (part.units, gathers, "fsdp"),
        (part.ends, of_ends, "fsdp"),
        (part.dealt, gathers, "expert_fsdp"),
    ):
        count, size = len(units), sum(units)
        yield "all-gather", group, times * count, times * b * size
        yield "reduce-scatter", group, scattered * count, scattered * 4 * size
        shard = 4 * size / len(groups[group])
        yield "all-reduce", "dp_replicate", exchanged * count, exchanged * shard


def of_stage(memory: LayoutMemory, number: int) -> Iterator[Kind]:
    """Yield what a stage of a pipeline sends to others: hidden states, and their gradients."""
    every, passes = microbatches_of(memory)
    part, own = memory.parts[number], next(each for each in memory.own if number in each)
    others = [number + 1] * (not part.last) + [number - 1] * (not part.first)
    count = every * sum(each not in own for each in others)
    yield "send", "pp", count, count * memory.hidden
    if "copy" in part.weights:  # its gradient
        table = memory.entries([part.weights["copy"]])[1]
        yield "send", "pp", passes, passes * 4 * table


def of_layers(memory: LayoutMemory, part: Stage) -> Iterator[Kind]:
    """Yield what the layers of a part wait for."""
    costs, (_, _, _, cp, tp, ep) = memory.costs, memory.degrees
    model, every, blocks = costs.model, microbatches_of(memory)[0], len(part.blocks)
    entry = memory.tokens * costs.itemsize  # bytes, for all tokens
    forward = 1 + (memory.mode == "full")
    gathers = 1 + (memory.mode != "none")  # "selective" gathers again too
    mixtures = [each for block in part.blocks if (each := costs.mixture(block))]
    if tp > 1:
        ends = [model.width] * (part.first + part.last)
        gathered, summed = list(ends), list(ends)
        for block in part.blocks:
            mixture, weights = costs.mixture(block), costs.blocks[block].values()
            latents = {each.shape[1] for each in weights if each.cut == "gathered rows"}
            branches = 1 if mixture is not None and mixture.shared is None else 2
            taken, given = [sum(latents) or model.width, model.width][:branches], branches
            gathered += taken * gathers + [model.width] * given
            summed += [model.width] * given * forward + taken
        yield "all-gather", "tp", every * len(gathered), every * entry * sum(gathered)
        yield "reduce-scatter", "tp", every * len(summed), every * entry * sum(summed)
        whole = [
            math.prod(each.shape)
            for each in part.weights.values()
            if each.cut not in (*ROWS, "columns") and not (each.experts and ep > 1)
        ]
        yield "all-reduce", "tp", every * len(whole), every * costs.itemsize * sum(whole)
        fused = sum(each.cut == "fused rows" for each in part.weights.values())
        exchanged = every * fused * (forward + 1)  # parts of queries, keys and values
        yield "all-to-all", "tp", exchanged, exchanged * entry * 3 * model.width / tp
        if part.last:  # three numbers of each token, in float32
            yield "all-reduce", "tp", every * memory.chunks, every * 12 * tp * memory.tokens
    if memory.parallelism.cp_method == "all-gather":
        latent = model.kept_width < 2 * model.heads[1] * model.head_width  # ranks of tp have all
        size = blocks * every * entry * cp * model.kept_width / (1 if latent else tp)
        yield "all-gather", "cp", 2 * blocks * every * gathers, size * gathers
        yield "reduce-scatter", "cp", 2 * blocks * every, size
    else:
        count, width = blocks * every * (forward + 1), model.mixed_width + model.kept_width
        yield "all-to-all", "cp", 4 * count, count * entry * width / tp
    for mixture in mixtures:
        rows, numbers = (2 * forward + 2) * entry * costs.used * model.width / tp, 8 * model.experts
        yield "all-to-all", "ep", every * (3 * forward + 2), every * (rows + forward * numbers)
        yield "all-reduce", "stage", mixture is mixtures[0], numbers


def placements_of(
    weight: Weight, degrees: Degrees
) -> tuple[tuple[int, ...], tuple[Placement, ...]]:
    """Return the mesh of a weight in a stage, replicas first, and how it lies there."""
    _, replicas, dp_shard, cp, tp, ep = degrees
    mesh, cut = (replicas, dp_shard * cp, tp), weight.cut in (*ROWS, "columns")
    if weight.experts and ep > 1:
        mesh, cut = (replicas, dp_shard * cp * tp // ep, ep), True
    dim, of_cut = entries_of(weight, degrees)[2], int(weight.cut == "columns")
    strided = cut and mesh[2] > 1 and dim == of_cut
    sharded = _StridedShard(dim, split_factor=mesh[2]) if strided else Shard(dim)
    return mesh, (Replicate(), sharded, Shard(of_cut) if cut else Replicate())


def owners_of(
    optimizer: MARS, weights: Weights, degrees: Degrees, first: int, itemsize: int
) -> tuple[OwnerLoads, list[Sent]]:
    """Return the orthogonalisation FLOPs of ranks that share work, and what rank `first` sends.

    It is the first of a stage, which has `weights`. Entries of matrices travel in `itemsize` bytes.
    """
    loads: OwnerLoads = {}
    sent: dict[tuple[str, tuple[int, ...]], tuple[int, int]] = {}
    for group in optimizer.param_groups:
        if not isinstance(RULES[group["rule"]], MatrixRule):
            continue
        alike: dict[Any, list[tuple[MatrixShape, tuple[Placement, ...]]]] = {}
        cut = {name: group[name] for name in CUT}
        for name in group["param_names"]:
            if name in weights:
                mesh, placed = placements_of(weights[name], degrees)
                axes = [n for n in (0, 1, 2) if mesh[n] > 1 and not placed[n].is_replicate()]
                shape = MatrixShape(weights[name].shape, **cut)
                alike.setdefault((mesh, *axes), []).append((shape, placed))
        flops = ORTHOGONALIZERS[group["orthogonalize"]].flops
        for (mesh, *axes), some in alike.items():
            grid = torch.arange(first, first + math.prod(mesh)).view(mesh)
            rows = ranks_along(grid, axes)
            places = [grid.eq(rank).nonzero()[0].tolist() for rank in rows[0]]
            place = MeshPlace(sum(rows, []), mesh, places, 0, 0, None, None)
            shapes, placements = zip(*some)
            extents = extents_of_shards(shapes, placements, place)
            stacks, parts = zip(*(shape.as_stack(each) for shape, each in zip(shapes, extents)))
            of_ranks = loads.setdefault(tuple(sorted(place.ranks)), {})
            for planned in plan_buckets(stacks, parts, flops, place.ranks, of_ranks):
                for kind, times, elements in of_bucket(rank_bucket(planned, parts, place), rows):
                    count, size = sent.get(kind, (0, 0))
                    sent[kind] = count + times, size + itemsize * elements
    return loads, [Sent(OPTIMIZER, *kind, *found) for kind, found in sent.items()]


def of_bucket(
    bucket: Bucket, rows: list[list[int]]
) -> Iterator[tuple[tuple[str, tuple[int, ...]], int, int]]:
    """Yield the operations for a bucket of matrices, how often, and what the first rank sends.

    `rows` has the ranks of each replica.
    """
    replicas = tuple(row[0] for row in rows)
    if not bucket.home and len(rows[0]) > 1:
        elements = sum(bucket.outgoing.elements[1:]) + sum(bucket.incoming.elements[1:])
        yield ("all-to-all", tuple(rows[0])), 2, elements
    if len(replicas) > 1:
        most = max(sum(block.numel for block in blocks) for blocks in bucket.by_replica)
        yield ("all-gather", replicas), 1, most * (len(replicas) - 1)
