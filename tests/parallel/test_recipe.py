"""Weights, loss and gradients of a sharded model are those of the plain one."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from tests.models.test_gpt2 import ARGS
from tests.support.ranks import run_ranks
from torchmars.models import build_model
from torchmars.models.initialize import init_weights
from torchmars.parallel.recipe import parallelize, reduce_gradients

BATCH = torch.randint(64, (8, 24), generator=torch.Generator().manual_seed(0))


def loss_of(model, tokens):
    return model(tokens).float().logsumexp(-1).mean()


def gradients_on(shape, dtype, compile):
    """Return the initial weights and the gradients of this rank's share of BATCH, gathered.

    The share is accumulated from two microbatches.
    """
    mesh = init_device_mesh(
        "cpu", shape, mesh_dim_names=("dp_replicate", "dp_shard")[-len(shape) :]
    )
    with torch.device("meta"):
        model = build_model(ARGS)
    parallelize(model, mesh, dtype, compile)
    model.to_empty(device="cpu")
    init_weights(model, seed=0)
    weights = {
        name: parameter.full_tensor().detach() for name, parameter in model.named_parameters()
    }
    for number, tokens in enumerate(
        BATCH.chunk(mesh.size())[torch.distributed.get_rank()].chunk(2), start=1
    ):
        reduce_gradients(model, last=number == 2)
        (loss_of(model, tokens) / 2).backward()
    assert all(
        parameter.dtype == parameter.grad.dtype == torch.float32 for parameter in model.parameters()
    )
    return weights, {
        name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()
    }


@pytest.mark.parametrize(
    "shape,dtype,compile,tolerance",
    [
        ((2,), torch.float32, False, 1e-5),
        ((4,), torch.float32, False, 1e-5),
        ((2, 2), torch.float32, False, 1e-5),
        ((2, 1), torch.float32, False, 1e-5),
        ((2,), torch.bfloat16, False, 3e-2),
        ((2,), torch.float32, True, 1e-5),
    ],
)
def test_sharded_equals_plain(shape, dtype, compile, tolerance):
    model = build_model(ARGS)
    init_weights(model, seed=0)
    loss_of(model, BATCH).backward()
    results = run_ranks(gradients_on, torch.Size(shape).numel(), shape, dtype, compile)
    for weights, gradients in results:
        for name, parameter in model.named_parameters():
            assert torch.equal(weights[name], parameter)
            error = (gradients[name] - parameter.grad).norm() / parameter.grad.norm()
            assert error < tolerance, name
