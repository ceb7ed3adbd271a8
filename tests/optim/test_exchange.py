"""What matrices that are sharded cost on the wire, and that ranks agree on it before."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from tests.support.ranks import run_ranks
from tests.support.steps import SHARDED, sharded, take_steps, whole
from tests.support.tiny import set_bfloat16
from torchmars.optim import MARS, param_groups
from torchmars.optim.matrices import owners


def spied(patch):
    """Return a list of the bytes that each all-to-all from now on sends to others."""
    sent, original = [], dist.all_to_all_single

    def spy(output, input, output_sizes, input_sizes, group=None, **options):
        mine = dist.get_rank(group)
        others = sum(size for rank, size in enumerate(input_sizes) if rank != mine)
        sent.append(others * input.element_size())
        return original(output, input, output_sizes, input_sizes, group=group, **options)

    patch.setattr(dist, "all_to_all_single", spy)
    return sent


def counted(shape, placements, rule, matrix_dtype):
    """Return what one step communicates on this rank.

    That is its collectives by name, the bytes sent to others in each all-to-all, the calls of
    full_tensor, and the number of buckets that are at home, and of those that are not.
    """
    parameters = sharded(init_device_mesh("cpu", shape), placements)
    optimizer = take_steps(parameters, rule, 1, max_grad_norm=1.0, matrix_dtype=matrix_dtype)
    calls = []
    with pytest.MonkeyPatch.context() as patch, CommDebugMode() as mode:
        sent = spied(patch)
        patch.setattr(DTensor, "full_tensor", lambda self: calls.append(self))
        optimizer.step()
    names = {
        str(name).split(".")[-1].strip("_"): count for name, count in mode.get_comm_counts().items()
    }
    home = [bucket.home for traffic in optimizer.plans.matrices for bucket in traffic.buckets]
    return names, sent, len(calls), (home.count(True), home.count(False))


# Rule, matrix_dtype, and the bytes of an entry on the wire.
COUNTED = [
    ("mars-m", "bfloat16", 2),
    ("mars-m", "float32", 4),
    ("mars-adamw", "auto", 0),
]


@pytest.mark.parametrize(
    "shape,placements", [((2,), [Shard(0)]), ((4,), [Shard(0)]), ((2, 2), [Replicate(), Shard(0)])]
)
def test_collectives_and_bytes_of_a_step(shape, placements):
    everyone = run_ranks(all_counted, torch.Size(shape).numel(), shape, placements)
    for results, (rule, _, width) in zip(zip(*everyone), COUNTED):
        check_counted(results, shape, rule, width)


def all_counted(shape, placements):
    return [counted(shape, placements, rule, matrix_dtype) for rule, matrix_dtype, _ in COUNTED]


def check_counted(results, shape, rule, width):
    shards, replicas = shape[-1], torch.Size(shape[:-1]).numel()
    # On two shards each has whole matrices of the one stack, on four one would have none.
    stays = shards == 2
    elements = sum(torch.Size(each).numel() for each in SHARDED if not (stays and len(each) == 3))
    for names, _, full_tensors, (home, away) in results:
        assert full_tensors == 0
        expected = {"allreduce": 2 if replicas > 1 else 1}
        if rule == "mars-m":
            assert home == stays and away >= 1
            expected |= {"alltoall_base": 2 * away} | (
                {"allgather_base": home + away} if replicas > 1 else {}
            )
        assert names == expected
    if rule == "mars-m":
        # width N / W (W - 1) / W bytes each way for each of W ranks on average, shared out over the
        # replicas. Here the shards are uneven and owners have whole matrices, so the bound is on
        # the sum: an owner's own part does not travel.
        total = sum(sum(sent) for _, sent, _, _ in results)
        assert 0 < total <= width * 2 * elements
        if shards == 2 and replicas == 1:
            assert total == pytest.approx(width * 2 * elements * (shards - 1) / shards, rel=0.25)


def even_bytes():
    """Return the bytes that this rank sends in a step over eight equal, evenly cut matrices."""
    mesh = init_device_mesh("cpu", (4,))
    parameters = [
        nn.Parameter(distribute_tensor(torch.randn(16, 8), mesh, [Shard(0)])) for _ in range(8)
    ]
    optimizer = MARS(parameters, rule="mars-m", matrix_dtype="bfloat16")
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    with pytest.MonkeyPatch.context() as patch:
        sent = spied(patch)
        optimizer.step()
    return sum(sent)


def test_bytes_are_the_formula_where_shards_are_even():
    """2 N / W (W - 1) / W bytes each way, with N = 1024 elements and W = 4 ranks."""
    assert run_ranks(even_bytes, 4) == [2 * (2 * 1024 / 4 * 3 / 4)] * 4


class Attention(nn.Module):
    """Whose heads are of 4 rows."""

    def __init__(self, mesh):
        super().__init__()
        self.head_rows = {"qkv": 9}
        self.qkv, given = nn.Linear(8, 36, bias=False), torch.randn(36, 8)
        self.qkv.weight = nn.Parameter(distribute_tensor(given, mesh, [Shard(0)]))


def bytes_of_heads(sizes):
    """Return the bytes that this rank sends in a step over the heads of a fused qkv."""
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("shards",))
    weights, found = [], []
    for per_head in (True, False):
        torch.manual_seed(0)
        model = Attention(mesh)
        groups = param_groups(model, "mars-m", per_head=per_head, by_role=BY_HAND[per_head])
        optimizer = MARS(groups, matrix_dtype="float32")
        model.qkv.weight.grad = torch.ones_like(model.qkv.weight)
        with pytest.MonkeyPatch.context() as patch:
            sent = spied(patch)
            optimizer.step()
        found.append(sum(sent))
        weights.append(model.qkv.weight.full_tensor())
    assert torch.equal(*weights)
    return found


BY_HAND = {True: {}, False: {"matrix": {"split": 9}}}


def test_heads_that_a_rank_has_whole_do_not_travel():
    """Of 9 heads on 3 ranks none; on 2 ranks half of the one that is cut, to its owner and back.

    The same pieces by `split` alone all travel to owners where one of them is cut.
    """
    assert run_ranks(bytes_of_heads, 3, (3,)) == [[0, 0]] * 3
    by_head, by_hand = (sum(each) for each in zip(*run_ranks(bytes_of_heads, 2, (2,))))
    assert by_head == 2 * 4 * (2 * 8) and by_hand > by_head


def in_buckets(elements):
    owners.BUCKET_ELEMENTS = elements
    parameters = sharded(init_device_mesh("cpu", (2,)), [Shard(0)])
    optimizer = take_steps(parameters, "mars-m")
    return whole(parameters), len(optimizer.plans.matrices[0].buckets)


def test_buckets_that_travel_while_others_are_computed_change_nothing():
    (several, many), (one, few) = (
        run_ranks(in_buckets, 2, 100)[0],
        run_ranks(in_buckets, 2, 2**26)[0],
    )
    assert many > few and few <= 2
    assert all(torch.equal(*each) for each in zip(several, one))


def plan_error(mesh, placements, sizes):
    """Return the optimizer's error for parameters of these `sizes` on this rank."""
    wholes = [torch.ones(size) for size in sizes]
    parameters = [
        nn.Parameter(distribute_tensor(whole, mesh, placements, src_data_rank=None))
        for whole in wholes
    ]
    try:
        MARS(parameters, rule="mars-m")
    except RuntimeError as error:
        return str(error)


def different_plans():
    """Return the errors on one axis, and where all shards of one replica agree: none may wait."""
    rank = dist.get_rank()
    sizes = [(8, 4), (4, 4), (4, 4)]
    swapped = [(8, 4), (4, 4), (6, 4)] if rank == 3 else sizes
    fewer = sizes[:2] if rank == 1 else sizes
    replicas = init_device_mesh("cpu", (2, 2))
    return [
        plan_error(replicas, [Replicate(), Shard(0)], swapped),
        plan_error(init_device_mesh("cpu", (4,)), [Shard(0)], fewer),
    ]


def test_ranks_that_plan_differently_say_so():
    errors = {error for each in run_ranks(different_plans, 4) for error in each}
    assert errors == {
        "the ranks must have the same matrix parameters in the same order, with the same settings "
        "and the same version of torchmars: their plans differ"
    }


def agreed(asked):
    """Return what two ranks make of a dtype each; the second one's CPU has no bfloat16."""
    parameters = sharded(init_device_mesh("cpu", (2,)), [Shard(0)])
    with pytest.MonkeyPatch.context() as patch:
        set_bfloat16(dist.get_rank() == 0, patch)
        answers = []
        for each in asked:
            try:
                optimizer = MARS(parameters, rule="mars-m", matrix_dtype=each[dist.get_rank()])
                answers.append(optimizer.plans.matrices[0].dtype)
            except RuntimeError:
                answers.append("differ")
    return answers


def test_ranks_on_different_cpus_agree_on_one_dtype():
    asked = [("auto", "auto"), ("bfloat16", "bfloat16"), ("auto", "float32")]
    first, second = run_ranks(agreed, 2, asked)
    assert first == second == [torch.float32, torch.bfloat16, "differ"]


def different_options():
    """Return the error where one rank makes other directions of the same matrices."""
    parameter = nn.Parameter(
        distribute_tensor(torch.ones(8, 4), init_device_mesh("cpu", (2,)), [Shard(0)])
    )
    method = ["newton-schulz", "polar-express"][dist.get_rank()]
    try:
        MARS([{"params": [parameter], "rule": "mars-m", "orthogonalize": method}])
    except RuntimeError as error:
        return str(error)


def test_ranks_with_other_options_say_so():
    assert all("with the same settings" in each for each in run_ranks(different_options, 2))


def beside_a_group_of_some():
    """Return whether ranks step together where some have made a group that others have not."""
    if dist.get_rank() < 2:
        dist.new_group([0, 1], use_local_synchronization=True)
    mesh = init_device_mesh("cpu", (2, 2))
    parameters = sharded(mesh, [Shard(0), Shard(0)])
    optimizer = take_steps(parameters, "mars-m", 1, max_grad_norm=1.0)
    return bool(optimizer.grad_norm > 0)


def test_ranks_that_have_made_different_groups_step_together():
    """As stages of a pipeline do, before another run in the same process."""
    assert run_ranks(beside_a_group_of_some, 4) == [True] * 4
