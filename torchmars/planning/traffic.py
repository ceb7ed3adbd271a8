"""What a rank sends in a step, by formula, and which rank owns which matrices.

Volumes are those of the best known algorithms, rings: Thakur et al. 2005. Those of FSDP are as in
Rajbhandari et al. 2020 (arXiv 1910.02054), section 7.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import product
from typing import Any, NamedTuple

import torch

from torchmars.optim.matrices.orthogonal import ORTHOGONALIZERS
from torchmars.optim.matrices.owners import plan_buckets
from torchmars.optim.matrices.shapes import Extents, MatrixShape
from torchmars.optim.meshes import ranks_along
from torchmars.optim.rules import RULES, MatrixRule
from torchmars.optim.settings import CUT
from torchmars.planning.memory import RankMemory, placed

OF_LAYERS = ("tp", "cp", "ep")  # groups that layers wait for
Ranks = range | tuple[int, ...]


class Sent(NamedTuple):
    """What a rank sends in a step, of one kind."""

    operation: str
    along: str
    """The name of the group of ranks that take part."""
    group: Ranks
    size: float
    """Bytes."""


def groups_of(rank: RankMemory) -> dict[str, range]:
    """Return the groups that the first rank of a rank of the pipeline is in."""
    pp, dp_replicate, dp_shard, cp, tp, ep = rank.layout.degrees
    inner = dp_shard * cp * tp
    stage = dp_replicate * inner
    steps = {
        "tp": (1, tp),
        "cp": (tp, cp),
        "fsdp": (tp, dp_shard * cp),
        "dp_replicate": (inner, dp_replicate),
        "ep": (1, ep),
        "fsdp of experts": (ep, inner // ep),
    }
    first = rank.rank * stage
    groups = {name: range(first, first + step * n, step) for name, (step, n) in steps.items()}
    return groups | {"pp": range(0, pp * stage, stage)}


# The operation, the name of the group, and the bytes of whole tensors.
Kind = tuple[str, str, float]


def traffic_of(rank: RankMemory) -> list[Sent]:
    """Return what the first rank of a rank of the pipeline sends in the passes of a step."""
    groups, kinds = groups_of(rank), (*of_units(rank), *of_layers(rank))
    return sent_of((each, name, groups[name], size) for each, name, size in kinds)


def sent_of(kinds: Iterable[tuple[str, str, Ranks, float]]) -> list[Sent]:
    """Return what a rank sends of operations, groups and bytes of whole tensors: each kind once."""
    sent = defaultdict[tuple[str, str, Ranks], float](float)
    for operation, along, group, size in kinds:
        n = len(group)
        ring = {"send": 1.0, "all-reduce": 2 * (n - 1) / n}.get(operation, (n - 1) / n)
        sent[operation, along, group] += ring * size
    return [Sent(*kind, size) for kind, size in sent.items() if size]


def of_units(rank: RankMemory) -> Iterator[Kind]:
    """Yield what is sent while a rank computes: FSDP's weights and gradients, hidden states."""
    layout, (_, _, dp_shard, cp, tp, ep) = rank.layout, rank.layout.degrees
    every, passes, shards = layout.every, layout.config.optimizer.passes, dp_shard * cp
    scattered = passes if layout.parallelism.accumulate == "whole" else every
    exchanged = every if layout.parallelism.accumulate == "reduced" else passes
    gathers = 2 * every if layout.parallelism.blocks_reshard(shards) else passes
    ends = sum(rank.ends)
    for entries, times, group, size in (
        (rank.computed - ends - rank.experts, gathers, "fsdp", shards),
        (ends, min(gathers, every) if layout.costs.tied else gathers, "fsdp", shards),
        (rank.experts, gathers, "fsdp of experts", shards * tp // ep),
    ):
        yield "all-gather", group, times * layout.costs.itemsize * entries
        yield "reduce-scatter", group, scattered * 4 * entries
        yield "all-reduce", "dp_replicate", exchanged * 4 * entries / size
    yield "send", "pp", every * rank.borders * layout.hidden
    if "copy" in rank.tensors:  # its gradient
        yield "send", "pp", passes * 4 * layout.entries([rank.tensors["copy"]])[1]


def of_layers(rank: RankMemory) -> Iterator[Kind]:
    """Yield what the layers of a rank wait for."""
    layout, costs, (_, _, _, cp, tp, _) = rank.layout, rank.layout.costs, rank.layout.degrees
    model, every, blocks = costs.model, layout.every, len(rank.blocks)
    entry = every * layout.tokens * costs.itemsize  # bytes, for all tokens
    forward = 1 + (layout.mode == "full")
    gathers = 1 + (layout.mode != "none")  # "selective" gathers again too
    mixtures = {block: each for block in rank.blocks if (each := costs.routed.get(block))}
    if tp > 1:
        gathered = summed = model.width * (rank.first + rank.last)
        for block in rank.blocks:
            weights, lone = costs.weights[block].values(), mixtures.get(block)
            latents = sum({each.shape[1] for each in weights if each.cut == "gathered rows"})
            branches = 1 if lone is not None and lone.shared is None else 2
            taken = (latents or model.width) + model.width * (branches - 1)
            gathered += taken * gathers + model.width * branches
            summed += model.width * branches * forward + taken
        yield "all-gather", "tp", entry * gathered
        yield "reduce-scatter", "tp", entry * summed
        places = [placed(each, layout.degrees) for each in rank.tensors.values()]
        whole = sum(each.gathered for each in places if each.placements[2].is_replicate())
        yield "all-reduce", "tp", every * costs.itemsize * whole
        fused = sum(each.cut == "fused rows" for each in rank.tensors.values())
        parts = 3 * model.width / tp  # of queries, keys and values
        yield "all-to-all", "tp", fused * (forward + 1) * entry * parts
    if layout.parallelism.cp_method == "all-gather":
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


def owners_of(rank: RankMemory) -> tuple[dict[int, int], list[Sent]]:
    """Return the orthogonalisation FLOPs of each rank that has a rank of the pipeline's stages.

    And what the first of them sends, as if all owned as much.
    """
    layout, first = rank.layout, groups_of(rank)["tp"][0]
    itemsize = 2 if layout.config.optimizer.matrix_dtype == "bfloat16" else 4
    loads, kinds = dict[int, int](), list[tuple[str, str, Ranks, float]]()
    for group in layout.costs.optimizer.param_groups:
        if not isinstance(RULES[group["rule"]], MatrixRule):
            continue
        alike: dict[Any, list[tuple[MatrixShape, Extents]]] = {}
        cut = {name: group[name] for name in CUT}
        for name in [each for each in group["param_names"] if each in rank.tensors]:
            _, _, mesh, placements = placed(rank.tensors[name], layout.degrees)
            axes = [n for n in (1, 2) if mesh[n] > 1 and not placements[n].is_replicate()]
            coordinates = product(*(range(mesh[n] if n in axes else 1) for n in (0, 1, 2)))
            shape = MatrixShape(rank.tensors[name].shape, **cut)
            extents = tuple(shape.extent(mesh, placements, each) for each in coordinates)
            alike.setdefault((mesh, *axes), []).append(shape.as_stack(extents))
        flops = ORTHOGONALIZERS[group["orthogonalize"]].flops
        for (mesh, *axes), some in alike.items():
            grid = torch.arange(first, first + math.prod(mesh)).view(mesh)
            rows = ranks_along(grid, axes)  # the ranks of each replica
            shards, copies = tuple(rows[0]), tuple(row[0] for row in rows)
            shapes, parts = zip(*some)
            for bucket in plan_buckets(shapes, parts, flops, sum(rows, []), loads):
                entries = sum(each.length * math.prod(each.shape) for each, _ in bucket.owners)
                size = itemsize * entries / len(shards)
                kinds.append(("all-gather of matrices", "copies", copies, size))
                there_and_back = 2 * size / len(copies) * (not bucket.home)
                kinds.append(("all-to-all of matrices", "shards", shards, there_and_back))
    return loads, sent_of(kinds)
