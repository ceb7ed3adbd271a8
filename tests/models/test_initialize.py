"""Initial weights: their distribution, and that no layout changes them."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from tests.support.ranks import run_ranks
from torchmars.models.initialize import TILE_COLUMNS, TILE_ROWS, init_weights


class Weights(nn.Module):
    """Parameters of all shapes: several tiles, parts of tiles, rows that ranks cannot share evenly.

    A rank of four has nothing of `experts` and `vector`.
    """

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(2100, 36, bias=False)
        self.down = nn.Linear(2100, 21, bias=False)
        self.experts = nn.Parameter(torch.empty(3, 10, 5))
        self.vector = nn.Parameter(torch.empty(3))
        self.norm = nn.Parameter(torch.empty(7))

    def init_std(self, name):
        return None if name == "norm" else 0.5


def weights_of(model, seed=0):
    init_weights(model, seed)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def changed_on(shape, tensor_parallel):
    """Return the parameters that differ from the plain model's on a mesh of this shape.

    One axis is FSDP, two are HSDP, or FSDP over tensor parallelism.
    """
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("outer", "inner")[: len(shape)])
    with torch.device("meta"):
        model = Weights()
    if tensor_parallel:
        cuts = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(model, mesh["inner"], cuts)
        # FSDP wants all parameters of a unit on one mesh.
        for layer in (model.up, model.down):
            fully_shard(layer, mesh=mesh["outer"])
        fully_shard(model, mesh=mesh["outer"])
    else:
        fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    weights = weights_of(model)
    return [
        name
        for name, whole in weights_of(Weights()).items()
        if not torch.equal(weights[name].full_tensor(), whole)
    ]


@pytest.mark.parametrize("shape,tensor_parallel", [((4,), False), ((2, 2), False), ((2, 2), True)])
def test_layouts_do_not_change_them(shape, tensor_parallel):
    assert run_ranks(changed_on, 4, shape, tensor_parallel) == [[]] * 4


def test_seed_and_name_decide_alone():
    torch.manual_seed(1)
    first = weights_of(Weights(), seed=5)
    torch.manual_seed(2)
    again, other = weights_of(Weights(), seed=5), weights_of(Weights(), seed=6)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first if name != "norm")
    assert not torch.equal(first["up.weight"][:21], first["down.weight"])
    assert (first["norm"] == 1).all()


class Large(nn.Module):
    """One matrix of 64 x 4 tiles."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(64 * TILE_ROWS, 4 * TILE_COLUMNS, dtype=dtype))

    def init_std(self, name):
        return 0.02


def test_they_are_normal():
    weight = weights_of(Large())["weight"].double() / 0.02
    count = weight.numel()
    # Five standard errors. The draw is always the same.
    assert abs(weight.mean()) < 5 / count**0.5
    assert abs(weight.square().mean() - 1) < 5 * (2 / count) ** 0.5
    for bound in (0.5, 1.0, 2.0, 3.0):
        expected = torch.special.ndtr(torch.tensor(bound)).item()
        error = 5 * (expected * (1 - expected) / count) ** 0.5
        assert (weight < bound).double().mean().item() == pytest.approx(expected, abs=error)
    for step in (1, TILE_ROWS):  # neighbours, and the same place of two tiles
        product = (weight[step:] * weight[:-step]).mean()
        assert abs(product) < 5 / weight[step:].numel() ** 0.5


def test_no_two_tiles_are_equal():
    weight = weights_of(Large())["weight"]
    starts = weight[::TILE_ROWS, ::TILE_COLUMNS]
    assert starts.numel() == 256
    assert starts.unique().numel() == 256


def test_dtypes_round_the_same_draw():
    weight = weights_of(Large())["weight"]
    assert torch.equal(weights_of(Large(torch.bfloat16))["weight"], weight.bfloat16())
