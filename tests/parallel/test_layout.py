"""Named axes: which ranks are in which group, on any sizes of the axes."""

import math

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import run_ranks
from torchmars.config import Degrees
from torchmars.core.errors import UserError
from torchmars.parallel.groups import AXES, JOINT_AXES, make_groups, make_meshes, rows_along
from torchmars.parallel.layout import Layout

SIZES = Degrees(pp=2, dp_replicate=2, dp_shard=3, cp=2, tp=2, ep=4)


def ranks_of(degrees):
    sizes = [getattr(degrees, axis) for axis in AXES]
    return torch.arange(math.prod(sizes)).view(sizes)


@pytest.mark.parametrize("axes", [(axis,) for axis in AXES] + list(JOINT_AXES.values()))
def test_rows_differ_along_their_axes_only(axes):
    """Against the coordinates of each rank, counted by hand."""
    ranks = ranks_of(SIZES)
    coordinates = {rank: (ranks == rank).nonzero()[0].tolist() for rank in range(ranks.numel())}
    others = [place for place, axis in enumerate(AXES) if axis not in axes]
    rows = rows_along(ranks, axes)
    assert sorted(rank for row in rows for rank in row) == list(range(ranks.numel()))
    for row in rows:
        assert row == sorted(row) and len(row) == math.prod(getattr(SIZES, axis) for axis in axes)
        assert len({tuple(coordinates[rank][place] for place in others) for rank in row}) == 1


def expert_rows_of(degrees):
    """The rows of ranks that experts are dealt out over, where none of the ranks exists."""
    dist.destroy_process_group()  # that of the one rank which runs this
    dist.init_process_group("fake", rank=5, world_size=ranks_of(degrees).numel())
    mesh, _, experts = make_meshes("cpu", degrees)
    group = make_groups(mesh, experts)["ep"]
    return experts.mesh.flatten(0, -2).tolist(), dist.get_process_group_ranks(group.process_group)


def test_experts_are_dealt_out_over_neighbours():
    [(rows, own)] = run_ranks(expert_rows_of, 1, SIZES)
    assert rows[:4] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]
    inner = [set(row) for row in rows_along(ranks_of(SIZES), ("dp_shard", "cp", "tp"))]
    assert all(any(set(row) <= each for each in inner) for row in rows)
    assert own == [4, 5, 6, 7]


def groups_here(degrees):
    """Each group of this rank: its rank and size, and the global ranks of its process group."""
    layout = Layout.create(torch.device("cpu"), degrees)
    found = {}
    for name, group in layout.groups.items():
        members = dist.get_process_group_ranks(group.process_group)
        assert dist.get_rank(group.process_group) == group.rank and len(members) == group.size
        found[name] = members
    total = layout.mean_loss(torch.tensor(float(layout.group("loss").rank)))
    sharded = layout.shard_mesh
    return found, total, layout.norm_group is not None, (sharded.mesh_dim_names, sharded.mesh)


def test_every_axis_is_there_with_a_process_group():
    results = run_ranks(groups_here, 4, Degrees(dp_replicate=2, dp_shard=2))
    for rank, (groups, mean, stages, (names, _)) in enumerate(results):
        assert groups["world"] == groups["data"] == groups["loss"] == [0, 1, 2, 3]
        assert groups["pp"] == groups["cp"] == groups["tp"] == groups["ep"] == [rank]
        assert groups["sample"] == [rank]
        assert groups["dp_shard"] == [rank // 2 * 2, rank // 2 * 2 + 1]
        assert groups["dp_replicate"] == [rank % 2, rank % 2 + 2]
        assert mean == 1.5 and not stages and names == ("dp_replicate", "fsdp")


def test_ranks_of_a_pipeline_read_the_same_data_and_share_norms():
    results = run_ranks(groups_here, 4, Degrees(pp=2, dp_shard=2))
    for rank, (groups, mean, stages, _) in enumerate(results):
        assert groups["data"] == [rank // 2 * 2, rank // 2 * 2 + 1]
        assert groups["pp"] == groups["sample"] == [rank % 2, rank % 2 + 2] and stages
        assert groups["loss"] == [0, 1, 2, 3]
        assert mean == 0 + 1 + 2 + 3 - 3  # the sum of all over the two that have the last stage


def test_fsdp_shards_over_context_too():
    results = run_ranks(groups_here, 4, Degrees(dp_shard=2, cp=2))
    for rank, (groups, mean, stages, (names, ranks)) in enumerate(results):
        assert names == ("fsdp",) and ranks.tolist() == [0, 1, 2, 3] and not stages
        assert groups["cp"] == groups["sample"] == [rank // 2 * 2, rank // 2 * 2 + 1]
        assert groups["data"] == [rank % 2, rank % 2 + 2]
        assert groups["loss"] == [0, 1, 2, 3] and mean == 1.5


def outcome(work, *args):
    """What a call returned, or the error that it raised."""
    try:
        return work(*args)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def refuse(error):
    raise error


def exchanged():
    """What ranks tell each other, on each."""
    layout, rank = Layout.create(torch.device("cpu"), Degrees(dp_shard=4)), dist.get_rank()
    dist.all_gather_object = None  # it takes memory for the largest object from every rank
    large = "x" * 10**6

    def fail_on(ranks, error):
        return outcome(layout.on_all, lambda: rank in ranks and refuse(error(f"of {rank}")))

    return {
        "first": outcome(layout.on_first, lambda: (large, rank)) == (large, 0),
        "gathered": outcome(layout.gather, lambda: rank * 10),
        "agreed": outcome(layout.agree, lambda: rank < 4),
        "not agreed": outcome(layout.agree, lambda: rank != 2),
        "done": fail_on([], UserError),
        "mistake": fail_on([1, 3], UserError),
        "crash": fail_on([2], ValueError),
        "refused": outcome(layout.on_first, lambda: refuse(UserError(f"by {rank}"))),
    }


def test_what_ranks_tell_each_other_does_not_grow_with_their_number():
    ranks = run_ranks(exchanged, 4)
    assert [each.pop("gathered") for each in ranks] == [[0, 10, 20, 30], [], [], []]
    mistakes = [each.pop("mistake") for each in ranks]
    assert mistakes == [f"UserError: of {of}" for of in (1, 1, 1, 3)]  # a rank's own comes first
    crashes = [each.pop("crash") for each in ranks]
    assert crashes.pop(2) == "ValueError: of 2"
    assert crashes == ["RuntimeError: rank 2: ValueError('of 2')"] * 3
    told = {"first": True, "agreed": True, "not agreed": False, "done": False}
    assert ranks == [told | {"refused": "UserError: by 0"}] * 4
