"""Models that torch wraps, and its own checkpoints of them: MARS trains them as plain ones."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.support.full import FULL, full_but
from tests.support.ranks import run_ranks
from torchmars.optim import MARS, param_groups
from torchmars.optim.rules import RULES, MatrixRule

SETTINGS = dict(lr=6e-3, weight_decay=0.1, gamma=0.025)


class TwoLayers(nn.Module):
    """Linear layers whose shards under FSDP x TP are strided."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


def train_layers(model, optimizer, steps, gather=lambda tensor: tensor):
    for step in steps:
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        (30 * model(x).square().mean()).backward()
        optimizer.step()
    return [gather(parameter).detach() for parameter in model.parameters()]


def layers_fsdp_tp():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = TwoLayers()
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    return train_layers(model, MARS(model.parameters(), **SETTINGS), range(5), DTensor.full_tensor)


def layers_fsdp():
    model = TwoLayers()
    fully_shard(model)
    return train_layers(model, MARS(model.parameters(), **SETTINGS), range(5), DTensor.full_tensor)


def layers_ddp():
    model = nn.parallel.DistributedDataParallel(TwoLayers(), gradient_as_bucket_view=True)
    return train_layers(model, MARS(model.parameters(), **SETTINGS), range(5))


WRAPPED = [(layers_fsdp_tp, 4), (layers_fsdp, 4), (layers_fsdp, 2), (layers_ddp, 2)]


@pytest.mark.parametrize("function,size", full_but([WRAPPED[0], *WRAPPED[2:]], WRAPPED))
def test_wrapped_models_train_like_plain_ones(function, size):
    model = TwoLayers()
    expected = train_layers(model, MARS(model.parameters(), **SETTINGS), range(5))
    for parameters in run_ranks(function, size):
        for actual, whole in zip(parameters, expected):
            torch.testing.assert_close(actual, whole, rtol=2e-6, atol=1e-6)


def sharded(rule):
    model = TwoLayers()
    fully_shard(model)
    return model, MARS(param_groups(model, rule, lr=6e-3), max_grad_norm=1.0)


def save_with_torch(folder, rules):
    """Make two steps of each rule, a checkpoint by torch's own functions, three more steps."""
    result = {}
    for rule in rules:
        model, optimizer = sharded(rule)
        train_layers(model, optimizer, range(2))
        dcp.save(
            {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)},
            checkpoint_id=f"{folder}/{rule}",
        )
        result[rule] = train_layers(model, optimizer, range(2, 5), DTensor.full_tensor)
    return result


def load_with_torch(folder, rules):
    result = {}
    for rule in rules:
        model, optimizer = sharded(rule)
        state = {
            "model": model.state_dict(),
            "optimizer": get_optimizer_state_dict(model, optimizer),
        }
        dcp.load(state, checkpoint_id=f"{folder}/{rule}")
        model.load_state_dict(state["model"])
        set_optimizer_state_dict(model, optimizer, state["optimizer"])
        result[rule] = train_layers(model, optimizer, range(2, 5), DTensor.full_tensor)
    return result


@pytest.mark.parametrize("rules", [["mars-adamw", "mars-m"], pytest.param([*RULES], marks=FULL)])
def test_torch_checkpoints_reshard(tmp_path, rules):
    expected = run_ranks(save_with_torch, 2, str(tmp_path), rules)[0]
    actual = run_ranks(load_with_torch, 4, str(tmp_path), rules)[0]
    for rule in rules:
        # A momentum that differs in its last bit may round to another bfloat16 before a matrix is
        # orthogonalised.
        tolerance = 1e-3 if isinstance(RULES[rule], MatrixRule) else 2e-6
        for one, other in zip(actual[rule], expected[rule]):
            torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def gradient_on_one_rank():
    """Step where rank 0 has no gradient for the second parameter.

    The shapes that travel must agree all the same.
    """
    mesh = init_device_mesh("cpu", (2,))
    parameters = [
        nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)])) for _ in range(2)
    ]
    optimizer = MARS(parameters, **SETTINGS)
    for parameter in parameters[: 1 + dist.get_rank()]:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return [parameter.to_local().detach() for parameter in parameters]


def test_ranks_with_different_gradients_do_not_hang():
    first, second = run_ranks(gradient_on_one_rank, 2)
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], torch.ones(2)) and (second[1] < 1).all()
