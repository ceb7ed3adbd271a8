"""What all ranks agree on, over shards, copies and parts: the norm, and whether a step counts."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from tests.optim.reference import gradients
from tests.support.ranks import run_ranks
from tests.support.steps import starts, whole
from torchmars.optim import MARS, passes
from torchmars.optim.passes import inner_products

SHAPES = [(8, 6), (6, 8), (4, 4), (8, 8)]
RULES = ("mars-adamw", "mars-m", "adamw", "muon")
STEPS = 6
ZERO = dict(rule="mars-adamw", max_grad_norm=0.5, lr=0.1)


def lay_out(whole, layout):
    """`whole` on a (mesh, placements), or plain where that is None."""
    return whole if layout is None else distribute_tensor(whole, *layout, src_data_rank=None)


def local(tensor):
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def give(parameters, layouts, step):
    for seed, (parameter, layout) in enumerate(zip(parameters, layouts)):
        parameter.grad = lay_out(gradients(parameter.shape, STEPS, seed)[step].clone(), layout)


def verdicts(layouts, broken, rule):
    """Make two steps; in the first, rank 3's gradient of parameter `broken` is not finite.

    Return the skipped steps, whether the first changed weights, both norms, the last weights, and
    how many all-reduces a step made.
    """
    parameters = [
        nn.Parameter(lay_out(start, layout)) for start, layout in zip(starts(SHAPES), layouts)
    ]
    optimizer = MARS(parameters, rule=rule, max_grad_norm=1.0)
    give(parameters, layouts, 0)
    if dist.get_rank() == 3:
        local(parameters[broken].grad)[0, 0] = math.nan
    with CommDebugMode() as counted:
        optimizer.step()
    norm = optimizer.grad_norm.item()
    skipped = optimizer.telemetry()["skipped_steps"]
    changed = any(
        not torch.equal(local(p), local(lay_out(start, layout)))
        for p, start, layout in zip(parameters, starts(SHAPES), layouts)
    )
    give(parameters, layouts, 1)
    optimizer.step()
    last, all_reduces = whole(parameters), counts(counted)["allreduce"]
    return skipped, changed, norm, optimizer.grad_norm.item(), last, all_reduces


def counts(mode):
    """Return the collectives that a CommDebugMode saw, by name."""
    return {
        str(name).split(".")[-1].strip("_"): count for name, count in mode.get_comm_counts().items()
    }


def layouts_of_four_ranks():
    """Return the layouts of all parameters, and the all-reduces of a step, case by case.

    There is one all-reduce for each set of axes, and one for each mesh with copies.
    """
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    line = init_device_mesh("cpu", (4,))
    sharded, copied = (line, [Shard(0)]), (line, [Replicate()])
    hsdp, both = (grid, [Replicate(), Shard(0)]), (grid, [Shard(0), Shard(1)])
    dp_only = (grid["dp"], [Shard(0)])
    return {
        "HSDP": ([hsdp] * 4, 2),
        "plain beside sharded": ([sharded, sharded, None, sharded], 2),
        "copies alone": ([copied] * 4, 1),
        "FSDP x TP": ([dp_only, both, dp_only, both], 4),
    }


def agreement_of_four_ranks():
    result = {}
    for name, (layouts, all_reduces) in layouts_of_four_ranks().items():
        for rule in RULES:
            result[name, rule] = verdicts(layouts, 2, rule), all_reduces
    return result, alone(), stages(), drifting()


def drifting():
    """Return this rank's weights after steps in which one of two replicas adds up otherwise.

    Its products are larger by a last bit of float32, and the per-tensor clip follows from them.
    """
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    layouts = [(grid, [Replicate(), Shard(0)])] * len(SHAPES)
    parameters = [
        nn.Parameter(lay_out(start, layout)) for start, layout in zip(starts(SHAPES), layouts)
    ]
    optimizer = MARS(parameters, lr=0.1, clip=0.01)
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() >= 2:
            patch.setattr(
                passes,
                "inner_products",
                lambda *given: inner_products(*given) * (1 + torch.finfo(torch.float32).eps),
            )
        for step in range(STEPS):
            give(parameters, layouts, step)
            optimizer.step()
    return [local(parameter) for parameter in parameters]


def alone():
    """Return the number of collectives of a step of plain tensors."""
    parameter = nn.Parameter(torch.ones(4, 4))
    optimizer = MARS([parameter], max_grad_norm=1.0)
    parameter.grad = torch.ones(4, 4)
    with CommDebugMode() as counted:
        optimizer.step()
    return counted.get_total_counts()


def groups_of_stages(parameters):
    """Return a group for each half of the model, with its rule and role."""
    return [
        {"params": parameters[:2], "rule": "mars-adamw", "role": "first"},
        {"params": parameters[2:], "rule": "muon", "role": "second"},
    ]


def train_stages(parameters, groups, layout, numbers, break_one, **settings):
    """Make steps of the parameters `numbers` of the model; the third may be broken.

    Return the telemetry of each step, and the collectives of one.
    """
    optimizer = MARS(groups, max_grad_norm=0.5, matrix_dtype=torch.float32, **settings)
    reported = []
    for step in range(STEPS):
        for number, parameter in zip(numbers, parameters):
            whole = gradients(parameter.shape, STEPS, number)[step].clone()
            parameter.grad = lay_out(whole, layout)
        if step == 2 and break_one:
            local(parameters[-1].grad).fill_(math.inf)
        with CommDebugMode() as counted:
            optimizer.step()
        reported.append(optimizer.telemetry() | {"norm": optimizer.grad_norm.item()})
    return reported, counts(counted)


def stages():
    """Train two stages of two shards each: every rank has a part of one half of the model."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    stage, layout = mesh.get_local_rank("pp"), (mesh["dp"], [Shard(0)])
    numbers = [2 * stage, 2 * stage + 1]
    parameters = [nn.Parameter(lay_out(starts(SHAPES)[number], layout)) for number in numbers]
    group = groups_of_stages(parameters * 2)[stage]
    reported, counted = train_stages(
        parameters,
        [group],
        layout,
        numbers,
        dist.get_rank() == 3,
        norm_group=mesh["pp"].get_group(),
    )
    return (
        numbers,
        [parameter.full_tensor().detach() for parameter in parameters],
        reported,
        counted,
    )


@pytest.fixture(scope="module")
def four_ranks():
    return run_ranks(agreement_of_four_ranks, 4)


def test_one_broken_copy_or_part_makes_all_ranks_skip(four_ranks):
    agreements = [agreement for agreement, *_ in four_ranks]
    for case in agreements[0]:
        (_, _, _, norm, weights, _), _ = agreements[0][case]
        for agreement in agreements:
            (skipped, changed, broken_norm, next_norm, last, counted), all_reduces = agreement[case]
            assert skipped == 1 and not changed and not math.isfinite(broken_norm), case
            assert next_norm == norm, case
            assert all(torch.equal(one, other) for one, other in zip(last, weights)), case
            assert counted == all_reduces, case


def test_replicas_that_add_up_otherwise_stay_the_same(four_ranks):
    *_, first = four_ranks[0]
    for (*_, mine), (*_, copy) in zip(four_ranks[:2], four_ranks[2:]):
        assert all(map(torch.equal, mine, copy))
    assert not any(torch.equal(local(a), b[: len(a)]) for a, b in zip(first, starts(SHAPES)))


def test_plain_tensors_alone_communicate_nothing(four_ranks):
    assert [count for _, count, *_ in four_ranks] == [0] * 4


def test_a_norm_group_makes_parts_one_model(four_ranks):
    """Stages of different rules: norm, telemetry and verdict are those of one process with all."""
    parameters = [nn.Parameter(start) for start in starts(SHAPES)]
    wanted, _ = train_stages(parameters, groups_of_stages(parameters), None, range(4), True)
    assert wanted[-1]["skipped_steps"] == 1 and max(each["norm"] for each in wanted[3:]) > 0.5
    for _, _, (numbers, halves, reported, counted), _ in four_ranks:
        for number, half in zip(numbers, halves):
            torch.testing.assert_close(half, parameters[number].detach(), rtol=1e-5, atol=1e-6)
        for step, (mine, theirs) in enumerate(zip(reported, wanted)):
            assert set(mine) == set(theirs)
            for name in mine:
                if step != 2:
                    assert mine[name] == pytest.approx(theirs[name], rel=1e-5, abs=1e-9), name
            assert math.isfinite(mine["norm"]) == (step != 2)
        assert counted["allreduce"] == 2  # of shards, and of parts


def on_two_ranks():
    """Return the errors of FSDP1 in both forms, and runs of ZeRO with and without a norm group."""
    errors = []
    for use_orig_params in (False, True):
        model = FullyShardedDataParallel(
            nn.Linear(4, 4), device_id=torch.device("cpu"), use_orig_params=use_orig_params
        )
        try:
            MARS(model.parameters())
        except ValueError as error:
            errors.append(str(error))
    result = []
    for group in (dist.group.WORLD, None):
        parameters = [nn.Parameter(start) for start in starts(SHAPES)]
        zero = ZeroRedundancyOptimizer(parameters, MARS, **ZERO, norm_group=group)
        reported = train_plain(parameters, zero, zero.optim)
        result.append(([parameter.detach() for parameter in parameters], reported))
    return errors, result


def train_plain(parameters, optimizer, mars):
    """Make steps with plain gradients, and return the norms and the telemetry at last."""
    norms = []
    for step in range(STEPS):
        give(parameters, [None] * len(parameters), step)
        optimizer.step()
        norms.append(mars.grad_norm.item())
    return norms, mars.telemetry()


def test_fsdp1_is_refused_and_zero_is_right_with_a_norm_group():
    parameters = [nn.Parameter(start) for start in starts(SHAPES)]
    optimizer = MARS(parameters, **ZERO)
    norms, reported = train_plain(parameters, optimizer, optimizer)
    assert min(norms) > 0.5
    for errors, ((weights, (their_norms, their_reported)), (wrong, _)) in run_ranks(
        on_two_ranks, 2
    ):
        assert len(errors) == 2
        assert all("FSDP1" in error and "fsdp.fully_shard" in error for error in errors)
        assert their_norms == pytest.approx(norms) and their_reported == pytest.approx(reported)
        for mine, theirs in zip(parameters, weights):
            torch.testing.assert_close(theirs, mine.detach(), rtol=1e-6, atol=1e-6)
        # What the group is for: without it each rank clips by the norm of its own parameters.
        assert any((one - other).abs().max() > 1e-3 for one, other in zip(wrong, parameters))
