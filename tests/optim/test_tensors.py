"""Tensors that wrap others: what kernels and checkpoints see of them."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils import _pytree as pytree  # private, torch 2.11 to 2.15

from tests.support.ranks import run_ranks
from torchmars.optim import MARS
from torchmars.optim.rules import RULES
from torchmars.optim.tensors import local_part, unwrapped


class Wrapper(torch.Tensor):
    """A tensor without memory, as weights that FSDP gathers in another dtype are."""

    @staticmethod
    def __new__(cls, inner, dtype=None):
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=dtype or inner.dtype
        )

    def __init__(self, inner, dtype=None):
        self.inner = inner

    def __tensor_flatten__(self):
        return ["inner"], {}

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        plain = pytree.tree_map_only(cls, lambda each: each.inner, (args, kwargs or {}))
        result = func(*plain[0], **plain[1])
        return cls(result, args[0].dtype) if func is torch.ops.aten.detach.default else result


@pytest.mark.parametrize("rule", RULES)
def test_a_wrapped_weight_is_updated_as_a_plain_one(rule):
    torch.manual_seed(0)
    values = torch.randn(6, 4)
    plain, inner = nn.Parameter(values.clone()), values.clone()
    wrapped = nn.Parameter(Wrapper(inner))
    weights = {"plain": plain, "wrapped": wrapped}
    optimizers = [MARS([("up.weight", weight)], rule=rule) for weight in weights.values()]
    for _ in range(3):
        gradient = torch.randn(6, 4)
        for weight, optimizer in zip(weights.values(), optimizers):
            weight.grad = gradient.clone()
            optimizer.step()
    assert torch.equal(inner, plain) and not torch.equal(inner, values)
    for one, other in zip(*(optimizer.state.values() for optimizer in optimizers)):
        assert all(torch.equal(one[key], other[key]) for key in one)


def test_a_weight_of_other_values_is_refused():
    quantised = Wrapper(torch.zeros(6, 4, dtype=torch.int8), torch.float32)
    with pytest.raises(TypeError, match="a Wrapper of torch.float32 has its values in .*int8"):
        MARS([{"params": [nn.Parameter(quantised)], "rule": "adamw"}])


def unwrapped_on(sizes):
    """Whether a sharded weight without its wrapper shares memory with it, and is of its layout."""
    mesh = init_device_mesh("cpu", (2,))
    inner = torch.full((sizes[mesh.get_local_rank()], 3), float(mesh.get_local_rank()))
    tensor = DTensor.from_local(
        Wrapper(inner),
        mesh,
        [Shard(0)],
        run_check=False,
        shape=torch.Size((sum(sizes), 3)),
        stride=(3, 1),
    )
    found = unwrapped(tensor)
    same = (found.shape, found.stride(), found.placements) == (
        tensor.shape,
        tensor.stride(),
        tensor.placements,
    )
    shared = local_part(found).data_ptr() == inner.data_ptr()
    return same, shared, type(found.to_local()), found.full_tensor()[:, 0].tolist()


def test_a_sharded_weight_without_its_wrapper():
    for found in run_ranks(unwrapped_on, 2, (3, 2)):
        assert found == (True, True, torch.Tensor, [0, 0, 0, 1, 1])
