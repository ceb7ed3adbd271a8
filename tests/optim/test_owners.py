"""The plan of who orthogonalises what, on meshes of any size, without ranks."""

import itertools
import math
from collections import Counter
from dataclasses import replace

import pytest
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import _StridedShard

from torchmars.optim.matrices import owners
from torchmars.optim.matrices.exchange import batches
from torchmars.optim.matrices.orthogonal import ORTHOGONALIZERS
from torchmars.optim.matrices.owners import plan_buckets, rank_bucket
from torchmars.optim.matrices.shapes import MatrixShape, block_of, extents_of_shards, units_of
from torchmars.optim.meshes import MeshPlace

FLOPS = ORTHOGONALIZERS["newton-schulz"].flops
STRIDED = (_StridedShard(0, split_factor=2), Shard(0))  # FSDP over ep
SECOND_DIM = (Shard(1), Shard(0))


def place_of(mesh, replicas=1, rank=0):
    """Return the place of a rank on a mesh whose axes are all sharded, and that has copies."""
    coordinates = [list(each) for each in itertools.product(*map(range, mesh))]
    shards = len(coordinates)
    replica, shard = divmod(rank, shards)
    ranks = list(range(shards * replicas))
    return MeshPlace(ranks, tuple(mesh), coordinates, replica, shard, None, None)


def planned(shapes, placements, place, loads=None):
    extents = extents_of_shards(shapes, [placements] * len(shapes), place)
    found = {} if loads is None else loads
    return plan_buckets(shapes, extents, FLOPS, place.ranks, found), extents


def one_by_one(shapes, ranks):
    """Return the owner of each part of each matrix, dealt out one by one, and all loads."""
    parts = []
    for number, shape in enumerate(shapes):
        rows = itertools.accumulate(shape.parts, initial=0)
        parts += [((number, row), size) for row, size in zip(rows, shape.parts)]

    def cost(part):
        return FLOPS(part[1], shapes[part[0][0]].matrix[2])

    total = Counter()
    for part in parts:
        total[part[0][0]] += cost(part)
    loads, found = [0] * ranks, {}
    order = sorted(parts, key=lambda each: (-total[each[0][0]], shapes[each[0][0]].shape, each[0]))
    for part in sorted(order, key=lambda each: -cost(each)):
        owner = min(range(ranks), key=lambda rank: (loads[rank], rank))
        loads[owner] += cost(part)
        found[part[0]] = owner
    return found, loads


MATRICES = [
    *[MatrixShape((96, 32), split=(48, 24, 24)), MatrixShape((32, 32)), MatrixShape((128, 32))] * 3,
    MatrixShape((32, 128)),
    MatrixShape((10, 6)),
]


@pytest.mark.parametrize("ranks", [5, 8])
def test_cut_matrices_go_to_the_rank_with_the_least_work(ranks):
    loads = {}
    buckets, _ = planned(MATRICES, (Shard(0),), place_of((ranks,)), loads)
    assert [bucket.home for bucket in buckets] == [False]
    found = {(units.parameter, units.row): owner for units, owner in buckets[0].owners}
    expected, work = one_by_one(MATRICES, ranks)
    assert found == expected and list(loads.values()) == work


def test_owners_have_work_already():
    loads = {0: 10**9, 1: 0, 2: 0}
    buckets, _ = planned([MatrixShape((7, 6))] * 2, (Shard(1),), place_of((3,)), loads)
    assert {owner for _, owner in buckets[0].owners} == {1, 2}


EXPERTS = [MatrixShape(shape) for shape in ((16, 24, 8), (16, 24, 8), (16, 8, 24))]
CASES = {
    "whole experts": (EXPERTS, STRIDED, (4, 2), 1, True),
    "whole experts with replicas": (EXPERTS, STRIDED, (4, 2), 3, True),
    "fewer experts than ranks": (EXPERTS, STRIDED, (16, 2), 1, False),
    "experts by columns of shards": (EXPERTS, SECOND_DIM, (4, 2), 1, False),
    "the same with replicas": (EXPERTS, SECOND_DIM, (4, 2), 2, False),
    "experts that do not divide": ([MatrixShape((5, 24, 8))], (Shard(0),), (3,), 1, True),
    "experts of which a rank has none": ([MatrixShape((5, 24, 8))], (Shard(0),), (4,), 1, False),
    "replicas alone": (MATRICES, (), (), 3, True),
    "cut matrices": (MATRICES, (Shard(0),), (5,), 2, False),
    "parts that fit": ([MatrixShape((12, 8), split=3)] * 2, (Shard(0),), (3,), 1, True),
    "parts that do not fit": ([MatrixShape((12, 8), split=3)] * 2, (Shard(0),), (2,), 1, False),
    "parts unlike": ([MatrixShape((12, 8), split=(6, 3, 3))], (Shard(0),), (2,), 1, False),
    "split experts": ([MatrixShape((6, 8, 4), split=2)] * 3, (Shard(0),), (3,), 2, True),
    "split experts, cut": ([MatrixShape((6, 8, 4), split=2)] * 3, SECOND_DIM, (3, 2), 1, False),
}


@pytest.mark.parametrize("name", CASES)
def test_what_ranks_send_receive_and_compute_fits(name):
    """Every block of every rank comes to the owner of its matrix, in the order that it expects."""
    shapes, placements, mesh, replicas, home = CASES[name]
    ranks = math.prod(mesh) * replicas
    plans, buckets = [], []
    for rank in range(ranks):
        place = place_of(mesh, replicas, rank)
        plan, extents = planned(shapes, placements, place)
        plans.append(plan)
        buckets.append([rank_bucket(each, extents, place) for each in plan])
    assert all(plan == plans[0] for plan in plans)
    assert {bucket.home for bucket in plans[0]} == {home}
    owned = Counter()
    for units, _ in itertools.chain.from_iterable(bucket.owners for bucket in plans[0]):
        owned.update((units.parameter, units.entry + i, units.row) for i in range(units.length))
    assert set(owned.values()) == {1}
    assert len(owned) == sum(shape.matrix[0] * len(shape.parts) for shape in shapes)
    shards = math.prod(mesh)
    for number in range(len(plans[0])):
        of_ranks = [rank[number] for rank in buckets]
        for rank, bucket in enumerate(of_ranks):
            assert bucket.travels == (not home or replicas > 1)
            if home:
                assert not bucket.outgoing.blocks and not bucket.incoming.blocks
                assert all(block.is_whole for blocks in bucket.by_replica for block in blocks)
                continue
            replica, shard = divmod(rank, shards)
            for peer in range(shards):
                theirs = of_ranks[replica * shards + peer]
                assert parcel(bucket.outgoing, peer) == parcel(theirs.incoming, shard)


HEADS = [MatrixShape((36, 8), split=9, per_head=True)]  # as a fused qkv with three heads
TWO_KINDS = [MatrixShape((40, 8), split=(6, 4) * 4, per_head=True)]


@pytest.mark.parametrize(
    "shapes,mesh,replicas,cut",
    [
        (HEADS, (2,), 1, {16}),  # 18 rows: four heads and a half
        (HEADS, (3,), 2, set()),
        (HEADS, (12,), 1, set(range(0, 36, 4))),  # 3 rows: no rank has a whole head
        (TWO_KINDS, (4,), 1, set()),
        (TWO_KINDS, (5,), 1, {6, 20, 30}),  # 8 rows: those end at 8, 24 and 32
    ],
)
def test_heads_that_a_shard_has_whole_stay_there(shapes, mesh, replicas, cut):
    place = place_of(mesh, replicas)
    plan, extents = planned(shapes, (Shard(0),), place)
    found = {
        home: {
            units.row: owner % len(extents[0])
            for bucket in plan
            if bucket.home == home
            for units, owner in bucket.owners
        }
        for home in (True, False)
    }
    assert set(found[False]) == cut
    starts = set(itertools.accumulate(shapes[0].parts[:-1], initial=0))
    assert set(found[True]) == starts - cut
    rows = shapes[0].shape[0] // mesh[0]
    assert all(row // rows == shard for row, shard in found[True].items())


@pytest.mark.parametrize("flatten", [False, True])  # which says nothing of two dims
@pytest.mark.parametrize("shards", [1, 3, 2, 12])
def test_the_heads_of_a_rank_are_one_tile_where_no_shard_cuts_one(shards, flatten):
    shape = replace(HEADS[0], flatten=flatten)
    [extents] = extents_of_shards([shape], [(Shard(0),)], place_of((shards,), 1))
    stack, of_stack = shape.as_stack(extents)
    if shards in (2, 12):  # 18 rows, or 3, where a head has 4
        assert (stack, of_stack) == (shape, extents)
        return
    [units] = units_of(0, stack)
    assert units.shape == (4, 8) and units.length == 9
    for extent, within in zip(extents, of_stack):
        heads = [block for each in units_of(0, shape) if (block := block_of(each, extent))]
        block = block_of(units, within)
        assert [each.start for each in block.cut(1)] == [each.start for each in heads]
        assert block.is_whole and block.numel == sum(each.numel for each in heads)


def parcel(packing, peer):
    """Return the blocks of a packing for or from a peer, as (units, first, rows, columns)."""
    ends = [0, *itertools.accumulate(packing.elements)]
    begins = [0, *itertools.accumulate(block.numel for block in packing.blocks)]
    return [
        (block.units, block.first, block.length, block.rows, block.cols)
        for block, begin in zip(packing.blocks, begins)
        if ends[peer] <= begin < ends[peer + 1]
    ]


@pytest.mark.parametrize(
    "mesh,placements,replicas", [((16, 8), STRIDED, 2), ((16, 8), SECOND_DIM, 1)]
)
def test_a_large_mixture_is_dealt_out_evenly(mesh, placements, replicas):
    """Qwen3-235B: 36,096 matrices on 128 or 256 ranks."""
    shapes = [MatrixShape(each) for each in ((128, 1536, 4096),) * 2 + ((128, 4096, 1536),)] * 94
    loads = {}
    buckets, _ = planned(shapes, placements, place_of(mesh, replicas), loads)
    each = {load // FLOPS(1536, 4096) for load in loads.values()}
    assert each == {36096 // len(loads)}
    # No more than the matrices of one replica: those at home are not planned one by one.
    assert sum(len(bucket.owners) for bucket in buckets) <= 36096


def test_matrices_of_a_shard_are_one_run():
    buckets, _ = planned(EXPERTS, STRIDED, place_of((4, 2)))
    assert len(buckets) == 1
    assert {units.length for units, _ in buckets[0].owners} == {2}
    assert len(buckets[0].owners) == 3 * 8


def test_what_is_at_home_is_dealt_out_first():
    """Cut matrices then make up for uneven shards: here five experts on three ranks."""
    shapes = [MatrixShape((5, 16, 16)), *[MatrixShape((16, 16))] * 4]
    loads = {}
    buckets, _ = planned(shapes, (Shard(0),), place_of((3,)), loads)
    assert [bucket.home for bucket in buckets] == [True, False]
    assert {load // FLOPS(16, 16) for load in loads.values()} == {3}


def test_buckets_at_home_are_as_large_for_each_shard(monkeypatch):
    monkeypatch.setattr(owners, "BUCKET_ELEMENTS", 16 * 24 * 8)
    at_home, _ = planned(EXPERTS * 2, STRIDED, place_of((4, 2)))
    cut, _ = planned(EXPERTS * 2, SECOND_DIM, place_of((4, 2)))
    assert (len(at_home), len(cut)) == (1, 6)


def test_batches_are_cut_from_runs():
    place = place_of((2,))
    plan, extents = planned([MatrixShape((14, 4, 8)), MatrixShape((4, 8, 4))], (Shard(0),), place)
    bucket = rank_bucket(plan[0], extents, place)
    (blocks,) = bucket.by_replica
    found = [
        [(block.first, block.length, block.start) for block in batch]
        for batch in batches(blocks, 4 * 32)
    ]
    assert found == [[(0, 4, 0)], [(4, 3, 128)], [(0, 2, 0)]]
    assert [len(batch) for batch in batches(blocks, 1)] == [1] * 9
