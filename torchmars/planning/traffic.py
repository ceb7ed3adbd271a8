"""What a rank sends in a step, by formula, and which rank owns which matrices.

Volumes are those of the best known algorithms, rings: Thakur et al. 2005. Those of FSDP are as in
Rajbhandari et al. 2020 (arXiv 1910.02054), section 7.
"""

import math
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
OF_LAYERS = ("tp", "cp", "ep", "stage")  # groups that layers wait for


class Sent(NamedTuple):
    """What a rank sends in a step, of one kind."""

    phase: str
    operation: str
    group: Sequence[int]
    """The ranks that take part."""
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


# The operation, the name of the group, and the bytes of whole tensors.
Kind = tuple[str, str, float]


def traffic_of(memory: LayoutMemory, rank: int) -> list[Sent]:
    """Return what the first rank of a rank of the pipeline sends in the passes of a step."""
    groups, sent = groups_of(memory.degrees, rank), dict[tuple[str, str], float]()
    for number in memory.own[rank]:
        part = memory.parts[number]
        kinds = *of_weights(memory, part), *of_stage(memory, number), *of_layers(memory, part)
        for operation, name, size in kinds:
            n = len(groups[name])
            ring = {"send": 1.0, "all-reduce": 2 * (n - 1) / n}.get(operation, (n - 1) / n)
            sent[operation, name] = sent.get((operation, name), 0) + ring * size
    return [
        Sent(PASSES, operation, groups[name], size, name in OF_LAYERS)
        for (operation, name), size in sent.items()
        if size and len(groups[name]) > 1
    ]


def of_weights(memory: LayoutMemory, part: Stage) -> Iterator[Kind]:
    """Yield what FSDP sends of the weights of a part, and of their gradients."""
    if memory.alone:
        return
    every, passes, b = memory.every, memory.passes, memory.costs.itemsize
    accumulate, groups = memory.parallelism.accumulate, groups_of(memory.degrees, 0)
    scattered = passes if accumulate == "whole" else every
    exchanged = every if accumulate == "reduced" else passes
    reshards = memory.parallelism.blocks_reshard(len(groups["fsdp"]))
    gathers = 2 * every if reshards else passes
    ends, dealt = sum(part.ends), sum(part.dealt)
    blocks = memory.entries(part.weights.values())[0] - ends - dealt
    of_ends = min(gathers, every) if memory.costs.tied else gathers
    for entries, times, group in (
        (blocks, gathers, "fsdp"),
        (ends, of_ends, "fsdp"),
        (dealt, gathers, "expert_fsdp"),
    ):
        yield "all-gather", group, times * b * entries
        yield "reduce-scatter", group, scattered * 4 * entries
        yield "all-reduce", "dp_replicate", exchanged * 4 * entries / len(groups[group])


def of_stage(memory: LayoutMemory, number: int) -> Iterator[Kind]:
    """Yield what a stage of a pipeline sends to others: hidden states, and their gradients."""
    part, own = memory.parts[number], next(each for each in memory.own if number in each)
    others = [number + 1] * (not part.last) + [number - 1] * (not part.first)
    yield "send", "pp", memory.every * sum(each not in own for each in others) * memory.hidden
    if "copy" in part.weights:  # its gradient
        yield "send", "pp", memory.passes * 4 * memory.entries([part.weights["copy"]])[1]


def of_layers(memory: LayoutMemory, part: Stage) -> Iterator[Kind]:
    """Yield what the layers of a part wait for."""
    costs, (_, _, _, cp, tp, ep) = memory.costs, memory.degrees
    model, every, blocks = costs.model, memory.every, len(part.blocks)
    entry = every * memory.tokens * costs.itemsize  # bytes, for all tokens
    forward = 1 + (memory.mode == "full")
    gathers = 1 + (memory.mode != "none")  # "selective" gathers again too
    mixtures = {block: each for block in part.blocks if (each := costs.routed.get(str(block)))}
    if tp > 1:
        gathered = summed = model.width * (part.first + part.last)
        for block in part.blocks:
            weights, lone = costs.blocks[block].values(), mixtures.get(block)
            latents = sum({each.shape[1] for each in weights if each.cut == "gathered rows"})
            branches = 1 if lone is not None and lone.shared is None else 2
            taken = (latents or model.width) + model.width * (branches - 1)
            gathered += taken * gathers + model.width * branches
            summed += model.width * branches * forward + taken
        yield "all-gather", "tp", entry * gathered
        yield "reduce-scatter", "tp", entry * summed
        whole = [
            math.prod(each.shape)
            for each in part.weights.values()
            if each.cut not in (*ROWS, "columns") and not (each.experts and ep > 1)
        ]
        yield "all-reduce", "tp", every * costs.itemsize * sum(whole)
        fused = sum(each.cut == "fused rows" for each in part.weights.values())
        parts = 3 * model.width / tp  # of queries, keys and values
        yield "all-to-all", "tp", fused * (forward + 1) * entry * parts
        if part.last:  # three numbers of each token, in float32
            yield "all-reduce", "tp", every * 12 * tp * memory.tokens
    if memory.parallelism.cp_method == "all-gather":
        latent = model.kept_width < 2 * model.heads[1] * model.head_width  # ranks of tp have all
        size = blocks * entry * cp * model.kept_width / (1 if latent else tp)
        yield "all-gather", "cp", size * gathers
        yield "reduce-scatter", "cp", size
    else:
        width = model.mixed_width + model.kept_width
        yield "all-to-all", "cp", blocks * (forward + 1) * entry * width / tp
    for mixture in mixtures.values():
        rows = (2 * forward + 2) * entry * mixture.router.used * model.width / tp
        yield "all-to-all", "ep", rows + every * forward * 8 * model.experts


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
    sent: dict[tuple[str, tuple[int, ...]], int] = {}
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
                for kind, elements in of_bucket(rank_bucket(planned, parts, place), rows):
                    sent[kind] = sent.get(kind, 0) + itemsize * elements
    return loads, [Sent(OPTIMIZER, *kind, size) for kind, size in sent.items()]


def of_bucket(
    bucket: Bucket, rows: list[list[int]]
) -> Iterator[tuple[tuple[str, tuple[int, ...]], int]]:
    """Yield the operations for a bucket of matrices, and how much the first rank sends.

    `rows` has the ranks of each replica.
    """
    replicas = tuple(row[0] for row in rows)
    if not bucket.home and len(rows[0]) > 1:
        elements = sum(bucket.outgoing.elements[1:]) + sum(bucket.incoming.elements[1:])
        yield ("all-to-all", tuple(rows[0])), elements
    if len(replicas) > 1:
        most = max(sum(block.numel for block in blocks) for blocks in bucket.by_replica)
        yield ("all-gather", replicas), most * (len(replicas) - 1)
