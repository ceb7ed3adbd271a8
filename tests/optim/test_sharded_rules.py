"""Every rule on shards of every kind: the same as on whole tensors.

A step makes no more communication than the plan says.
"""

from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.support.full import full_but
from tests.support.ranks import run_ranks
from tests.support.steps import SHARDED, sharded, starts, take_steps, whole
from torchmars.optim import MARS
from torchmars.optim.matrices import shapes

ELEMENTWISE = ("mars-adamw", "mars-lion", "adamw", "lion")
MATRIX = ("mars-shampoo", "mars-m", "muon")
MATRIX_DTYPES = ("bfloat16", "float32")
VECTORS = [(9,), (3,)]

OPTIONS = {"equilibrate": True, "orthogonalize": "polar-express"}


def sizes_of(rule):
    return SHARDED if rule in MATRIX else SHARDED + VECTORS


def unsharded(rule, **settings):
    parameters = [nn.Parameter(start) for start in starts(sizes_of(rule))]
    take_steps(parameters, rule, **settings)
    return whole(parameters)


def on_mesh(shape, placements, runs):
    mesh = init_device_mesh("cpu", shape)
    results = []
    for rule, settings in runs:
        parameters = sharded(mesh, placements, sizes_of(rule))
        take_steps(parameters, rule, **settings)
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


@pytest.mark.parametrize("shape,placements", full_but([LAYOUTS[4]], LAYOUTS))
def test_every_rule_equals_whole_tensors(shape, placements):
    """They are equal to rounding, and matrix rules without a clip exactly.

    Without a clip no norm is summed in parts, so the momenta are the same bit for bit.
    """
    tolerances = {rule: 1e-6 for rule in ELEMENTWISE}
    # A momentum that differs in its last bit may round to another bfloat16, and Newton–Schulz
    # makes a small difference larger.
    tolerances |= {"bfloat16": 1e-3, "float32": 1e-5}
    # Shards, and shards with replicas, take every dtype; it makes no difference to the others.
    every = (shape, placements) in (LAYOUTS[0], LAYOUTS[4])
    dtypes = MATRIX_DTYPES if every else MATRIX_DTYPES[:1]
    clipped = [(rule, {"max_grad_norm": 1.0}) for rule in ELEMENTWISE]
    clipped += [
        (rule, {"max_grad_norm": 1.0, "matrix_dtype": dtype}) for rule in MATRIX for dtype in dtypes
    ]
    exact = [
        (rule, {"clip": None, "matrix_dtype": dtype} | options)
        for rule in MATRIX
        for dtype in dtypes
        for options in ({}, OPTIONS)
        if dtype == dtypes[0] or not options
    ]
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
    take_steps(parameters, rule, **settings)
    return whole(parameters)


@pytest.mark.parametrize(
    "rules,options", full_but([(MATRIX, OPTIONS)], [(MATRIX, OPTIONS), (ELEMENTWISE + MATRIX, {})])
)
def test_fsdp_over_tensor_parallel(rules, options):
    exact = {"clip": None, "max_grad_norm": None} | options
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


def exchanged_pieces(shape, placements):
    """Return whether this rank's part of each parameter is, by the plan, that of DTensor."""
    mesh = init_device_mesh("cpu", shape)
    for start in starts(SHARDED):
        parameter = distribute_tensor(start, mesh, placements)
        block = shapes.intervals(
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
    """Step on a mesh that is one of two parts of the world, as pipeline stages have."""
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


CUTS = [
    ((24, 8), {"split": (2, 1, 3)}),  # q, k and v take turns
    ((8, 24), {"split": (8, 4, 4, 8), "transposed": True}),
    ((4, 6, 8), {"split": (1, 1), "transposed": True}),  # experts, gates beside ups
    ((8, 24), {"zero_mean": True}),
    ((8, 24), {"zero_mean": True, "equilibrate": True}),
    ((12, 8), {"split": (1, 2), "orthogonalize": "polar-express"}),
]


def cut_steps(distribute, matrix_dtype):
    results = []
    for seed, (shape, options) in enumerate(CUTS):
        generator = torch.Generator().manual_seed(seed)
        start, *sequence = (torch.randn(shape, generator=generator) for _ in range(4))
        parameter = nn.Parameter(distribute(start))
        group = {"params": [parameter], "rule": "mars-shampoo", "lr": 0.1, "clip": None}
        optimizer = MARS([group | options], matrix_dtype=matrix_dtype)
        for gradient in sequence:
            parameter.grad = distribute(gradient)
            optimizer.step()
        results.append(parameter)
    return whole(results)


def cut_on_mesh(placements):
    mesh = init_device_mesh("cpu", (2,))
    laid_out = partial(
        distribute_tensor, device_mesh=mesh, placements=placements, src_data_rank=None
    )
    return [cut_steps(laid_out, dtype) for dtype in MATRIX_DTYPES]


def cut_on_meshes():
    return cut_on_mesh([Shard(0)]) + cut_on_mesh([Shard(1)])


def test_cuts_through_shards_are_made_where_the_matrix_is_whole():
    wanted = [cut_steps(torch.clone, dtype) for dtype in MATRIX_DTYPES]
    for found in run_ranks(cut_on_meshes, 2):
        for number, each in enumerate(found):
            assert all(map(torch.equal, each, wanted[number % len(wanted)]))
