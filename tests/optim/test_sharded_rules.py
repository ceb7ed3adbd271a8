"""Every rule on shards of every kind: the same as on whole tensors, with no more communication than the plan says."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.optim.reference import gradients
from tests.ranks import run_ranks
from tests.tiny import set_bfloat16
from torchmars.optim import MARS, owners

ELEMENTWISE = ("mars-adamw", "mars-lion", "adamw", "lion")
MATRIX = ("mars-shampoo", "mars-m", "muon")
MATRIX_DTYPES = ("bfloat16", "mixed", "float32")
SHAPES = [
    (10, 6),
    (7, 12),
    (2, 5),
    (1, 4),
    (5, 6, 3),
    (8, 8),
    (8, 8),
]  # over 4 ranks: uneven and empty shards, fewer rows than ranks
STEPS = 6


def starts():
    return [
        torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        for seed, shape in enumerate(SHAPES)
    ]


def whole(values):
    return [
        value.full_tensor().detach() if isinstance(value, DTensor) else value.detach()
        for value in values
    ]


def steps(parameters, rule, distribute, number=STEPS, **settings):
    """Take `number` steps with gradients given whole and laid out by `distribute`."""
    optimizer = MARS(parameters, rule=rule, weight_decay=0.1, **settings)
    sequences = [gradients(shape, STEPS, seed) for seed, shape in enumerate(SHAPES)]
    for step in range(number):
        for parameter, sequence in zip(parameters, sequences):
            parameter.grad = distribute(sequence[step])
        optimizer.step()
    return optimizer


def unsharded(rule, **settings):
    parameters = [nn.Parameter(start) for start in starts()]
    steps(parameters, rule, lambda gradient: gradient.clone(), **settings)
    return whole(parameters)


def on_mesh(shape, placements, runs):
    mesh = init_device_mesh("cpu", shape)
    results = []
    for rule, settings in runs:
        parameters = [
            nn.Parameter(distribute_tensor(start, mesh, placements)) for start in starts()
        ]
        steps(
            parameters,
            rule,
            lambda gradient: distribute_tensor(gradient, mesh, placements),
            **settings,
        )
        results.append(whole(parameters))
    return results


LAYOUTS = [
    ((2,), [Shard(0)]),
    ((4,), [Shard(0)]),
    ((4,), [Shard(1)]),
    ((4,), [Replicate()]),
    ((2, 2), [Replicate(), Shard(0)]),
    ((2, 2), [Shard(0), Shard(1)]),
    ((2, 2), [Shard(0), Shard(0)]),
]


@pytest.mark.parametrize("shape,placements", LAYOUTS)
def test_every_rule_equals_whole_tensors(shape, placements):
    """To rounding, and for matrix rules with momenta that are the same bit for bit (no clip: no norm is summed in parts) exactly."""
    tolerances = {rule: 1e-6 for rule in ELEMENTWISE}
    # A momentum that differs in its last bit may round to another bfloat16, and Newton–Schulz
    # makes a small difference larger.
    tolerances |= {"bfloat16": 1e-3, "mixed": 1e-3, "float32": 1e-5}
    # Shards, and shards with replicas, take every dtype; it makes no difference to the others.
    every = (shape, placements) in (LAYOUTS[0], LAYOUTS[4])
    dtypes = MATRIX_DTYPES if every else MATRIX_DTYPES[:1]
    clipped = [(rule, {"max_grad_norm": 1.0}) for rule in ELEMENTWISE]
    clipped += [
        (rule, {"max_grad_norm": 1.0, "matrix_dtype": dtype}) for rule in MATRIX for dtype in dtypes
    ]
    exact = [(rule, {"clip": None, "matrix_dtype": dtype}) for rule in MATRIX for dtype in dtypes]
    expected = [unsharded(rule, **settings) for rule, settings in clipped + exact]
    ranks = torch.Size(shape).numel()
    for results in run_ranks(on_mesh, ranks, shape, placements, clipped + exact):
        for (rule, settings), result, wanted in zip(clipped, results, expected):
            tolerance = tolerances[settings.get("matrix_dtype", rule)]
            for one, other in zip(result, wanted):
                torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
        for run, result, wanted in zip(exact, results[len(clipped) :], expected[len(clipped) :]):
            assert all(torch.equal(one, other) for one, other in zip(result, wanted)), run


class Layers(nn.Module):
    """Column- and row-wise parallel layers: under FSDP x TP the first has strided shards."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(6, 10, bias=False), nn.Linear(10, 6, bias=False)


class PartlyParallel(nn.Module):
    """A layer that is not tensor parallel comes first: its mesh is a part of the others'."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.mix = nn.Linear(6, 6, bias=False)
        self.up, self.down = nn.Linear(6, 10, bias=False), nn.Linear(10, 6, bias=False)


def on_fsdp_tp(rules, settings):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    result = {}
    for build in (Layers, PartlyParallel):
        for rule in rules:
            model = build()
            styles = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(model, mesh["tp"], styles)
            fully_shard(model, mesh=mesh["dp"])
            result[build.__name__, rule] = train_layers(model, rule, settings)
    strided = [type(placement).__name__ for placement in model.up.weight.placements]
    return result, strided


def train_layers(model, rule, settings):
    parameters = list(model.parameters())
    optimizer = MARS(parameters, rule=rule, weight_decay=0.1, **settings)
    sequences = [
        gradients(tuple(parameter.shape), STEPS, seed) for seed, parameter in enumerate(parameters)
    ]
    for step in range(STEPS):
        for parameter, sequence in zip(parameters, sequences):
            gradient = sequence[step].clone()
            if isinstance(parameter, DTensor):
                block = owners.intervals(
                    parameter.shape,
                    parameter.device_mesh.shape,
                    parameter.placements,
                    parameter.device_mesh.get_coordinate(),
                )
                local = gradient[tuple(slice(*interval) for interval in block)].contiguous()
                gradient = DTensor.from_local(
                    local,
                    parameter.device_mesh,
                    parameter.placements,
                    run_check=False,
                    shape=parameter.shape,
                    stride=parameter.stride(),
                )
            parameter.grad = gradient
        optimizer.step()
    return whole(parameters)


def test_fsdp_over_tensor_parallel():
    rules = ELEMENTWISE + MATRIX
    exact = {"clip": None, "max_grad_norm": None}
    results = run_ranks(on_fsdp_tp, 4, rules, exact)
    expected = {
        (build.__name__, rule): train_layers(build(), rule, exact)
        for build in (Layers, PartlyParallel)
        for rule in rules
    }
    for result, strided in results:
        assert "_StridedShard" in strided
        for (name, rule), parameters in result.items():
            for one, other in zip(parameters, expected[name, rule]):
                if rule in MATRIX:
                    assert torch.equal(one, other), (name, rule)
                else:
                    torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def counted(shape, placements, rule, matrix_dtype):
    """One step's collectives by name, bytes this rank sent to others in all-to-alls, full_tensor calls, and the buckets."""
    mesh = init_device_mesh("cpu", shape)
    parameters = [nn.Parameter(distribute_tensor(start, mesh, placements)) for start in starts()]
    optimizer = steps(
        parameters,
        rule,
        lambda gradient: distribute_tensor(gradient, mesh, placements),
        1,
        max_grad_norm=1.0,
        matrix_dtype=matrix_dtype,
    )
    sent, original = [], dist.all_to_all_single

    def spy(output, input, output_sizes, input_sizes, group=None, **options):
        mine = dist.get_rank(group)
        sent.append(
            sum(size for rank, size in enumerate(input_sizes) if rank != mine)
            * input.element_size()
        )
        return original(output, input, output_sizes, input_sizes, group=group, **options)

    calls = []
    with pytest.MonkeyPatch.context() as patch, CommDebugMode() as mode:
        patch.setattr(dist, "all_to_all_single", spy)
        patch.setattr(DTensor, "full_tensor", lambda self: calls.append(self))
        optimizer.step()
    names = {
        str(name).split(".")[-1].strip("_"): count for name, count in mode.get_comm_counts().items()
    }
    buckets = sum(len(traffic.buckets) for traffic in optimizer.plans.traffic)
    return names, sent, len(calls), buckets


# Rule, matrix_dtype, and the bytes of an entry on the wire.
COUNTED = [
    ("mars-m", "bfloat16", 2),
    ("mars-m", "mixed", 2),
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
    elements = sum(torch.Size(each).numel() for each in SHAPES)
    shards, replicas = shape[-1], torch.Size(shape[:-1]).numel()
    for names, sent, full_tensors, buckets in results:
        assert full_tensors == 0
        expected = {"allreduce": 2 if replicas > 1 else 1}
        if rule == "mars-m":
            expected |= {"alltoall_base": 2 * buckets} | (
                {"allgather_base": buckets} if replicas > 1 else {}
            )
        assert names == expected
    if rule == "mars-m":
        assert buckets >= 1
        # width N / W (W - 1) / W bytes each way for each of W ranks on average, shared out over the
        # replicas; here the
        # shards are uneven and owners hold whole matrices, so the bound is on the sum: what an owner holds itself does not travel.
        total = sum(sum(sent) for _, sent, _, _ in results)
        assert 0 < total <= width * 2 * elements
        if shards == 2 and replicas == 1:
            assert total == pytest.approx(width * 2 * elements * (shards - 1) / shards, rel=0.25)


def even_bytes():
    """Bytes sent by this rank in a step over eight equal matrices that divide evenly."""
    mesh = init_device_mesh("cpu", (4,))
    parameters = [
        nn.Parameter(distribute_tensor(torch.randn(16, 8), mesh, [Shard(0)])) for _ in range(8)
    ]
    optimizer = MARS(parameters, rule="mars-m")
    sent, original = [], dist.all_to_all_single

    def spy(output, input, output_sizes, input_sizes, group=None, **options):
        sent.append(
            2 * sum(size for rank, size in enumerate(input_sizes) if rank != dist.get_rank())
        )
        return original(output, input, output_sizes, input_sizes, group=group, **options)

    dist.all_to_all_single = spy
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return sum(sent)


def test_bytes_are_the_formula_where_shards_are_even():
    """2 N / W (W - 1) / W each way (design: whole matrices on owning ranks), N = 1024 elements here, W = 4."""
    assert run_ranks(even_bytes, 4) == [2 * (2 * 1024 / 4 * 3 / 4)] * 4


def overlapped(overlap):
    owners.BUCKET_ELEMENTS = 100  # several buckets
    mesh = init_device_mesh("cpu", (2,))
    parameters = [nn.Parameter(distribute_tensor(start, mesh, [Shard(0)])) for start in starts()]
    optimizer = steps(
        parameters,
        "mars-m",
        lambda gradient: distribute_tensor(gradient, mesh, [Shard(0)]),
        overlap=overlap,
    )
    assert len(optimizer.plans.traffic[0].buckets) > 2
    return whole(parameters)


def test_overlap_changes_nothing():
    with_overlap, without = run_ranks(overlapped, 2, True)[0], run_ranks(overlapped, 2, False)[0]
    assert all(torch.equal(one, other) for one, other in zip(with_overlap, without))


def plan_error(mesh, placements, sizes):
    """What the optimizer says of parameters of these `sizes` on this rank."""
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
    """On one dimension, and where all shards of one replica agree: none of its ranks may wait."""
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
    beginning = (
        "the ranks do not hold the same parameters in the same order: matrix parameter "
        "number 2 of their mesh is of shape (4, 4), flatten False, split 1, placed"
    )
    swapped = (
        "(Replicate(), Shard(dim=0)) on rank 0 and of shape (6, 4), flatten False, split 1, "
        "placed (Replicate(), Shard(dim=0)) on rank 3"
    )
    fewer = "(Shard(dim=0),) on rank 0 and missing on rank 1"
    wanted = [f"{beginning} {swapped}", f"{beginning} {fewer}"]
    assert run_ranks(different_plans, 4) == [wanted] * 4


def agreed(asked):
    """What two ranks, the second on a CPU without bfloat16, make of what each is asked for."""
    mesh = init_device_mesh("cpu", (2,))
    parameters = [nn.Parameter(distribute_tensor(start, mesh, [Shard(0)])) for start in starts()]
    with pytest.MonkeyPatch.context() as patch:
        set_bfloat16(dist.get_rank() == 0, patch)
        answers = []
        for each in asked:
            try:
                optimizer = MARS(parameters, rule="mars-m", matrix_dtype=each[dist.get_rank()])
                answers.append(optimizer.plans.traffic[0].matrix_dtype)
            except ValueError as error:
                answers.append(str(error))
    return answers


def test_ranks_on_different_cpus_agree_on_one_dtype():
    asked = [("auto", "auto"), ("bfloat16", "bfloat16"), ("auto", "mixed")]
    first, second = run_ranks(agreed, 2, asked)
    refused = "matrix_dtype must be the same on all ranks, they were given several"
    assert first == second == ["mixed", "bfloat16", refused]


def exchanged_pieces(shape, placements):
    """What this rank's plan says it holds of each parameter, against DTensor's own word."""
    mesh = init_device_mesh("cpu", shape)
    for start in starts():
        parameter = distribute_tensor(start, mesh, placements)
        block = owners.intervals(
            parameter.shape, mesh.shape, parameter.placements, mesh.get_coordinate()
        )
        if not torch.equal(
            start[tuple(slice(*interval) for interval in block)], parameter.to_local()
        ):
            return False
    return True


@pytest.mark.parametrize("shape,placements", LAYOUTS)
def test_blocks_are_those_of_dtensor(shape, placements):
    assert all(run_ranks(exchanged_pieces, torch.Size(shape).numel(), shape, placements))


def norm_on_half_of_the_world():
    """A mesh that is one of two parts of the world, as pipeline stages have."""
    stages = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "a", "b"))
    mesh, stage = stages["a", "b"], stages.get_local_rank("pp")
    parameter = nn.Parameter(
        distribute_tensor(torch.ones(8, 8), mesh, [Shard(0), Shard(1)], src_data_rank=None)
    )
    optimizer = MARS([parameter], rule="mars-m")
    parameter.grad = torch.full_like(parameter, 1.0 + stage)
    optimizer.step()
    return stage, optimizer.grad_norm.item()


def test_a_mesh_may_be_a_part_of_the_world():
    assert run_ranks(norm_on_half_of_the_world, 8) == [(0, 8.0)] * 4 + [(1, 16.0)] * 4
