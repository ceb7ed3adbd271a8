"""Which rank owns which matrix.

A matrix that lies whole on one shard is orthogonalised there, if its parameter has such on each
shard, or if it is a head. One that is cut is orthogonalised whole too, on one of the ranks. The
plan follows from shapes, meshes and placements alone, so every rank makes the same one on its own.
"""

import functools
import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torchmars.optim.matrices.shapes import (
    Block,
    Extents,
    MatrixShape,
    Units,
    block_of,
    units_of,
)
from torchmars.optim.meshes import MeshPlace

# A bucket travels in one all-to-all. It is small enough to overlap with the work on others, and has
# work for every rank.
BUCKET_ELEMENTS = 2**26

Heap = list[tuple[int, int]]  # the work of ranks in FLOPs so far, and which ranks: by `heapq`


class PlannedBucket(NamedTuple):
    """The matrices that are orthogonalised at one time, with their owners."""

    home: bool  # whether each of them lies whole on the shard of its owner
    owners: list[tuple[Units, int]]  # by their place among the ranks of the mesh


def plan_buckets(
    shapes: Sequence[MatrixShape],
    extents: Sequence[Extents],
    flops: Callable[[int, int], int],
    ranks: Sequence[int],
    loads: dict[int, int],
) -> list[PlannedBucket]:
    """Return units with their owners, bucket by bucket.

    `extents` has each shard's part of each parameter, and `ranks` are the shards of the first
    replica, then of the others. Units at home go to the ranks that have their shard, one in each
    replica, and those that are cut to all ranks: each unit to the rank with the least work so far,
    the most costly first ("longest processing time", Graham 1969). Those at home come first, since
    they have less choice. Parameters go into buckets by falling cost, so that equal shapes lie in
    one. `flops` is the cost of a matrix [rows, cols]. `loads` is the work of each global rank in
    FLOPs. It is carried on from bucket to bucket, and updated.
    """
    flops, shards = functools.cache(flops), len(extents[0])
    kinds = [units_by_home(*each) for each in zip(shapes, extents)]
    work = [loads.get(rank, 0) for rank in ranks]
    buckets = []
    for home in (True, False):
        found = [
            [(place, units._replace(parameter=number)) for place, units in by_home[not home]]
            for number, by_home in enumerate(kinds)
        ]
        groups = [range(shard, len(ranks), shards) for shard in range(shards)]
        heaps: list[Heap] = [
            [(work[owner], owner) for owner in group]
            for group in (groups if home else [range(len(ranks))])
        ]
        for heap in heaps:
            heapq.heapify(heap)
        # Matrices at home stay on their shard: a bucket may be as large for each of them.
        limit = BUCKET_ELEMENTS * (shards if home else 1)
        for bucket in _fill(found, shapes, flops, limit, len(ranks)):
            parts = [part for number in bucket for part in found[number]]
            parts.sort(key=lambda part: -flops(*part[1].shape))
            dealt = [
                each
                for place, part in parts
                for each in _deal(part, flops(*part.shape), heaps[place])
            ]
            buckets.append(PlannedBucket(home, dealt))
        for load, owner in itertools.chain(*heaps):
            work[owner] = load
    loads |= zip(ranks, work)
    return buckets


Placed = list[tuple[int, Units]]  # units with the place of the heap that their owner is taken from


@functools.lru_cache  # a model has few kinds of parameters
def units_by_home(shape: MatrixShape, extents: Extents) -> tuple[Placed, Placed]:
    """Return a parameter's units at home, each with its shard, and the others, with place 0.

    Heads are at home wherever a shard has all of one. Others are if none of them is cut, and all
    shards have work: each has one, and they are of one shape. Else none of them is.
    """
    units = units_of(0, shape)
    nowhere: tuple[Placed, Placed] = [], [(0, each) for each in units]
    if not shape.per_head and len(extents) > 1 and len({each.shape for each in units}) > 1:
        return nowhere
    at_home, home = [], set()
    for shard, extent in enumerate(extents):
        own = [block for each in units if (block := block_of(each, extent))]
        whole = [block for block in own if block.is_whole]
        if not shape.per_head and (not own or len(whole) < len(own)):
            return nowhere
        at_home += [(shard, each.units.part(each.first, each.length)) for each in whole]
        home |= {each.units for each in whole}
    return at_home, [(0, each) for each in units if each not in home]


def _fill(
    found: Sequence[Placed],
    shapes: Sequence[MatrixShape],
    flops: Callable[[int, int], int],
    limit: int,
    ranks: int,
) -> list[list[int]]:
    """Return the parameters that have units, in buckets of `limit` elements or work for `ranks`.

    `found` are the units of each parameter.
    """
    numbers = [number for number, parts in enumerate(found) if parts]
    costs = {
        number: sum(each.length * flops(*each.shape) for _, each in found[number])
        for number in numbers
    }
    elements = max(1, sum(math.prod(shapes[number].shape) for number in numbers))
    matrices = sum(each.length for number in numbers for _, each in found[number])
    count = max(1, min(-(-elements // limit), matrices // ranks))
    buckets: list[list[int]] = [[] for _ in range(count)]
    filled = 0
    for number in sorted(numbers, key=lambda each: (-costs[each], shapes[each].shape, each)):
        buckets[min(filled * count // elements, count - 1)].append(number)
        filled += math.prod(shapes[number].shape)
    return [bucket for bucket in buckets if bucket]


def _deal(units: Units, cost: int, heap: Heap) -> Iterator[tuple[Units, int]]:
    """Yield parts of `units` with their owners: each unit goes to the one with the least work.

    The units of an owner follow each other: it has them in one piece.
    """
    shares: dict[int, int] = {}
    for _ in range(units.length):
        load, owner = heap[0]
        heapq.heapreplace(heap, (load + cost, owner))
        shares[owner] = shares.get(owner, 0) + 1
    first = 0
    for owner, count in shares.items():
        yield units.part(first, count), owner
        first += count


class Packing(NamedTuple):
    """The blocks of one all-to-all, in the order in which they lie in memory: rank by rank."""

    blocks: list[Block]
    elements: list[int]
    """Of all blocks for, or from, each rank of the shard group."""


@dataclass
class Bucket:
    """This rank's work for one bucket."""

    home: bool
    """Whether all matrices lie whole on the shards of their owners: only replicas send anything."""
    by_replica: list[list[Block]]
    """This rank's blocks of the units that each replica owns, in the order in which they return.
    At home, equal shapes follow each other."""
    outgoing: Packing
    """This rank's blocks of the units that ranks of its replica own. Like the next two without
    blocks at home."""
    incoming: Packing
    """The blocks of the units that this rank owns."""
    owned: dict[tuple[int, int], list[Units]]  # by the shape of their matrices
    travels: bool  # whether anything of it is sent


def rank_bucket(planned: PlannedBucket, extents: Sequence[Extents], place: MeshPlace) -> Bucket:
    """Return the work of the rank at `place` for a bucket.

    `extents` has each shard's part of each parameter. The time is linear in the bucket's units, and
    in the rank's own units times the ranks.
    """
    shards, replicas = place.shards, len(place.ranks) // place.shards
    # This rank's blocks by their owner, and those of its units by where they come from.
    outgoing: dict[int, list[Block]] = {}
    incoming: dict[int, list[Block]] = {}
    owned: dict[tuple[int, int], list[Units]] = {}
    for units, owner in planned.owners:
        block = block_of(units, extents[units.parameter][place.shard])
        if block is not None:
            outgoing.setdefault(owner, []).append(block)
        if not planned.home and owner == place.replica * shards + place.shard:
            owned.setdefault(units.shape, []).append(units)
            for source, extent in enumerate(extents[units.parameter]):
                theirs = block_of(units, extent)
                if theirs is not None:
                    incoming.setdefault(source, []).append(theirs)
    by_replica = [
        _packing(outgoing, range(replica * shards, (replica + 1) * shards))
        for replica in range(replicas)
    ]
    if planned.home:
        for blocks, _ in by_replica:
            blocks.sort(key=lambda block: block.units.shape)
    return Bucket(
        planned.home,
        [blocks for blocks, _ in by_replica],
        Packing([], []) if planned.home else by_replica[place.replica],
        _packing(incoming, range(shards)),
        owned,
        travels=not planned.home or replicas > 1,
    )


def _packing(by_rank: Mapping[int, list[Block]], ranks: Sequence[int]) -> Packing:
    """Return the blocks for, or from, these ranks."""
    blocks = [by_rank.get(rank, []) for rank in ranks]
    elements = [sum(block.numel for block in each) for each in blocks]
    return Packing([*itertools.chain(*blocks)], elements)
