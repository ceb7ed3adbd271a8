"""State goes where its parameter goes: to shards, to other devices and dtypes, to other tensors."""

import copy
import os
from importlib.util import find_spec

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.optim.reference import gradients
from tests.support.ranks import run_ranks
from tests.support.steps import relative, run, whole
from torchmars.optim import MARS, param_groups
from torchmars.optim.rules import RULES, MatrixRule

LR = 0.01


class Net(nn.Module):
    """A matrix of odd size, a bias, an embedding."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.embed, self.up, self.head = nn.Embedding(9, 6), nn.Linear(6, 11), nn.Linear(11, 5)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))

    def forward(self, tokens):
        return self.head(torch.tanh(self.up(self.embed(tokens))))


def train(model, optimizer, steps, backward=torch.Tensor.backward):
    for step in steps:
        tokens = torch.randint(9, (8,), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        backward(3 * model(tokens).square().mean())
        optimizer.step()


def optimizer_of(model, rule, **settings):
    """Return an optimizer of bare parameters, or of named groups where the rule needs them.

    Matrices are in float32: bfloat16 amplifies a last bit.
    """
    groups = (
        param_groups(model, rule, lr=LR)
        if isinstance(RULES[rule], MatrixRule)
        else model.parameters()
    )
    return MARS(groups, lr=LR, rule=rule, matrix_dtype=torch.float32, **settings)


def plain(rule, steps=5):
    model = Net()
    train(model, optimizer_of(model, rule), range(steps))
    return whole(model.parameters())


def accelerated():
    """Return weights trained by Accelerate with FSDP2, some after steps without it.

    Also return whether a state of whole tensors was loaded into the shards.
    """
    from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
    from accelerate.utils import DistributedType

    os.environ |= {
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "1",
    }  # asked for, not used: there is a process group
    accelerator = Accelerator(cpu=True)
    # It offers FSDP2 on GPUs only; with its state set, its code shards and replaces on CPUs too.
    PartialState().distributed_type = accelerator.state.distributed_type = DistributedType.FSDP
    result = {}
    for rule, efficient, before in (
        ("mars-adamw", False, 0),
        ("mars-adamw", True, 2),
        ("adamw", False, 2),
        ("lion", False, 2),
        ("mars-m", False, 2),
    ):
        accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, cpu_ram_efficient_loading=efficient, auto_wrap_policy="no_wrap"
        )
        model = Net()
        optimizer = optimizer_of(model, rule)
        train(model, optimizer, range(before))
        full = copy.deepcopy(optimizer.state_dict())
        model, prepared = accelerator.prepare(model, optimizer)
        train(model, prepared, range(before, 4), accelerator.backward)
        assert all(
            isinstance(p, DTensor) and isinstance(value, DTensor)
            for p, state in optimizer.state.items()
            for key, value in state.items()
            if value.ndim
        )
        train(model, prepared, range(4, 5), accelerator.backward)
        result[rule, efficient] = whole(model.parameters())
        prepared.load_state_dict(full)  # a state of whole tensors
        result[rule, efficient, "loaded"] = all(
            torch.equal(getattr(value, "full_tensor", lambda value=value: value)(), saved[key])
            for state, saved in zip(
                optimizer.state_dict()["state"].values(), full["state"].values()
            )
            for key, value in state.items()
        )
    return result


def on_two_ranks():
    return replaced_on_meshes(), accelerated() if find_spec("accelerate") else None


@pytest.fixture(scope="module")
def results():
    """Return what two ranks give, started once for two tests."""
    return run_ranks(on_two_ranks, 2)


def test_accelerate_with_fsdp2(results):
    pytest.importorskip("accelerate")
    for _, result in results:
        for (rule, efficient, *loaded), parameters in result.items():
            if loaded:
                assert parameters
                continue
            for one, other in zip(parameters, plain(rule)):
                torch.testing.assert_close(
                    one, other, rtol=1e-4, atol=1e-5, msg=f"{rule} {efficient}"
                )


def replaced_on_meshes():
    """Train parameters that become shards, then shards of other dims of two meshes."""
    parameters = [
        nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(0)))
        for shape in ((6, 7), (5, 3))
    ]
    sequences = [gradients(tuple(p.shape), 8, seed) for seed, p in enumerate(parameters)]
    optimizer = MARS([{"params": parameters, "rule": "mars-m"}], lr=LR, matrix_dtype=torch.float32)
    line, square = init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (2, 1))
    for step in range(8):
        if step in (2, 4, 6):
            placements = {
                2: (line, [Shard(0)]),
                4: (line, [Shard(1)]),
                6: (square, [Shard(1), Shard(0)]),
            }[step]
            now = [
                p.full_tensor() if isinstance(p, DTensor) else p
                for p in optimizer.param_groups[0]["params"]
            ]
            optimizer.param_groups[0]["params"] = [
                nn.Parameter(distribute_tensor(p.detach(), *placements)) for p in now
            ]
        for parameter, sequence in zip(optimizer.param_groups[0]["params"], sequences):
            parameter.grad = sequence[step].clone()
            if isinstance(parameter, DTensor):
                parameter.grad = distribute_tensor(
                    sequence[step], parameter.device_mesh, parameter.placements
                )
        optimizer.step()
    results = [p.full_tensor().detach() for p in optimizer.param_groups[0]["params"]]
    return results, len(optimizer.state), len(optimizer.plans.matrices)


def test_shards_replaced_by_others(results):
    parameters = [
        nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(0)))
        for shape in ((6, 7), (5, 3))
    ]
    run(
        MARS([{"params": parameters, "rule": "mars-m"}], lr=LR, matrix_dtype=torch.float32),
        parameters,
        [gradients(tuple(p.shape), 8, seed) for seed, p in enumerate(parameters)],
    )
    for (actual, states, shardings), _ in results:
        assert (states, shardings) == (2, 1)  # nothing is left of former parameters
        for one, other in zip(actual, parameters):
            torch.testing.assert_close(one, other.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rule", ["mars-adamw", "adamw", "lion", "mars-m"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_model_that_changes_its_dtype(rule, overwrite):
    """It changes in place or by new parameters in the groups; before any step or after two."""
    for before in (0, 2):
        model, expected = Net(), Net().double()
        optimizer, reference = optimizer_of(model, rule), optimizer_of(expected, rule)
        train(model, optimizer, range(before))
        torch.__future__.set_overwrite_module_params_on_conversion(overwrite)
        try:
            former = list(model.parameters())
            old = dict(zip(former, model.double().parameters()))
        finally:
            torch.__future__.set_overwrite_module_params_on_conversion(False)
        for group in optimizer.param_groups:
            group["params"] = [old[p] for p in group["params"]]
        assert overwrite == (next(iter(old)) is not next(iter(old.values())))
        train(model, optimizer, range(before, 4))
        train(expected, reference, range(4))
        for one, other in zip(whole(model.parameters()), whole(expected.parameters())):
            assert one.dtype == torch.float64 and relative(one, other) < (1e-3 if before else 1e-7)
        assert len(optimizer.state) == len(old)
        assert all(
            value.dtype == torch.float64
            for state in optimizer.state.values()
            for key, value in state.items()
            if key != "step"
        )


def test_a_model_that_gets_its_memory_later():
    """It is made on the meta device, as by deferred initialisation."""
    with torch.device("meta"):
        model = Net()
    optimizer = optimizer_of(model, "mars-adamw", max_grad_norm=1.0)
    model = Net()
    optimizer.param_groups[0]["params"] = list(model.parameters())
    train(model, optimizer, range(3))
    expected = Net()
    train(expected, optimizer_of(expected, "mars-adamw", max_grad_norm=1.0), range(3))
    assert all(
        torch.equal(one, other)
        for one, other in zip(whole(model.parameters()), whole(expected.parameters()))
    )


def test_a_model_that_changes_its_memory_format():
    """Its elements get another order: the state must follow, or it is mixed up silently."""
    sequence = gradients((8, 4, 3, 3), 6, seed=0)
    start = torch.randn(8, 4, 3, 3, generator=torch.Generator().manual_seed(0))
    plain, last = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    run(MARS([plain]), [plain], [sequence])
    optimizer = MARS([last])
    run(optimizer, [last], [sequence[:3]])
    last.data, last.grad = last.data.to(memory_format=torch.channels_last), None
    run(optimizer, [last], [sequence[3:]])
    assert last.stride() != plain.stride() and relative(last, plain) < 1e-6


def test_groups_that_gain_and_lose_parameters():
    """Those that stay keep their state, and new ones start over, as with torch's AdamW."""
    first, second, third = (nn.Parameter(torch.ones(4)) for _ in range(3))
    optimizer = MARS([first, second])
    run(optimizer, [first, second], [gradients((4,), 3, seed) for seed in (0, 1)])
    kept = optimizer.state[second]["exp_avg"].clone()
    optimizer.param_groups[0]["params"] = [second, third, nn.Parameter(torch.ones(2, 2))]
    saved = optimizer.state_dict()["state"]
    assert torch.equal(saved[0]["exp_avg"], kept)
    assert not saved[1]["exp_avg"].any()
    assert set(saved) == {0, 1, 2}
    run(optimizer, [second, third], [gradients((4,), 3, seed) for seed in (0, 1)])
    assert optimizer.state[second]["step"] == 6 and optimizer.state[third]["step"] == 3


def test_what_cannot_follow_is_named():
    model = Net()
    optimizer = MARS(model.named_parameters(), exact=True)
    with pytest.raises(
        ValueError,
        match=r"parameter 'up.weight' \(1 of group 0\) has shape \(6, 11\) now, "
        r"and its state \(11, 6\)",
    ):
        optimizer.param_groups[0]["params"][1] = nn.Parameter(torch.ones(6, 11))
        optimizer.state_dict()
    optimizer.param_groups[0]["params"][1] = model.up.weight
    model(torch.tensor([1])).sum().backward()
    optimizer.look_ahead()
    model.double()
    with pytest.raises(RuntimeError, match="between look_ahead"):
        optimizer.step()
