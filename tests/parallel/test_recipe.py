"""Weights, loss and gradients of a sharded model are those of the plain one."""

import pytest
import torch

from tests.models.test_gpt2 import ARGS
from tests.support.ranks import run_ranks
from torchmars.config import Degrees
from torchmars.models.gpt2 import GPT2
from torchmars.models.initialize import init_weights
from torchmars.parallel.fsdp import reduce_gradients
from torchmars.parallel.layout import Layout
from torchmars.parallel.recipe import parallelize

BATCH = torch.randint(64, (8, 24), generator=torch.Generator().manual_seed(0))


def loss_of(model, tokens):
    return model.head(model(tokens)).float().logsumexp(-1).mean()


def gradients_on(shape, dtype, compile):
    """Return the initial weights and the gradients of this rank's share of BATCH, gathered.

    The share is accumulated from two microbatches.
    """
    layout = Layout.create(torch.device("cpu"), Degrees(dp_replicate=shape[0], dp_shard=shape[1]))
    with torch.device("meta"):
        model = GPT2(ARGS)
    parallelize(model, layout, dtype, compile)
    model.to_empty(device="cpu")
    init_weights(model, seed=0)
    weights = {
        name: parameter.full_tensor().detach() for name, parameter in model.named_parameters()
    }
    for number, tokens in enumerate(
        BATCH.chunk(layout.data.size)[layout.data.rank].chunk(2), start=1
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
        ((1, 2), torch.float32, False, 1e-5),
        ((1, 4), torch.float32, False, 1e-5),
        ((2, 2), torch.float32, False, 1e-5),
        ((2, 1), torch.float32, False, 1e-5),
        ((1, 2), torch.bfloat16, False, 3e-2),
        ((1, 2), torch.float32, True, 1e-5),
    ],
)
def test_sharded_equals_plain(shape, dtype, compile, tolerance):
    model = GPT2(ARGS)
    init_weights(model, seed=0)
    loss_of(model, BATCH).backward()
    results = run_ranks(gradients_on, torch.Size(shape).numel(), shape, dtype, compile)
    for weights, gradients in results:
        for name, parameter in model.named_parameters():
            assert torch.equal(weights[name], parameter)
            error = (gradients[name] - parameter.grad).norm() / parameter.grad.norm()
            assert error < tolerance, name
