"""The optimizer on a GPU: compiled kernels, NCCL, no waiting, and how fast it moves memory."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from tests.gpu import optimizers
from tests.gpu.device import DEVICE, ON_GPU, sized, without_waiting
from torchmars.cluster import connection
from torchmars.config import ParallelismConfig
from torchmars.config.gpt2 import GPT2Args
from torchmars.models.gpt2 import GPT2
from torchmars.models.initialize import init_weights
from torchmars.optim import MARS, param_groups

pytestmark = pytest.mark.gpu

ARGS = sized(
    GPT2Args(n_layer=2, n_head=4, n_embd=256, vocab_size=4096, seq_len=128),
    GPT2Args(n_layer=1, n_head=2, n_embd=32, vocab_size=64, seq_len=16),
)
RULES = ["mars-adamw", "mars-lion", "mars-m", "mars-shampoo", "muon", "adamw"]
NARROW = {"momentum_dtype": torch.bfloat16, "last_grad_dtype": torch.bfloat16}


def filled(model, seed):
    """Give every parameter of a model the gradient of a seed."""
    for number, parameter in enumerate(model.parameters()):
        generator = torch.Generator().manual_seed(1000 * seed + number)
        values = torch.randn(parameter.shape, generator=generator) * 1e-2
        gradient = torch.empty_like(parameter)
        local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
        local.copy_(values)
        parameter.grad = gradient


def stepped(rule, device, compile=False, sharded=False, steps=4, **settings):
    """Return the weights, on the CPU, after some steps whose learning rate changes."""
    torch.manual_seed(0)
    with torch.device("meta"):
        model = GPT2(ARGS)
    model.to_empty(device=device)
    init_weights(model, 0)
    if sharded:
        for block in model.blocks.values():
            fully_shard(block)
        fully_shard(model)
    optimizer = MARS(param_groups(model, rule), max_grad_norm=1.0, compile=compile, **settings)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
        filled(model, step)
        optimizer.step()
    weights = [parameter.detach() for parameter in model.parameters()]
    return [(each.full_tensor() if sharded else each).cpu() for each in weights]


def relative(found, expected):
    return max(
        ((one - other).norm() / other.norm().clamp(min=1e-9)).item()
        for one, other in zip(found, expected)
    )


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("compile", [False, True])
def test_steps_are_those_of_a_cpu(rule, compile):
    """Compiled kernels take their factors as tensors [] on the CPU or the GPU."""
    # The sign of Lion, and bfloat16 matrices, turn a rounding into more.
    tolerance = 1e-5 if "adamw" in rule else 2e-2
    found = stepped(rule, DEVICE, compile)
    assert relative(found, stepped(rule, torch.device("cpu"))) < tolerance


@pytest.fixture
def one_rank():
    connection.start(ParallelismConfig())
    yield
    connection.stop()


@pytest.mark.parametrize("rule", ["mars-adamw", "mars-m", "muon"])
def test_rules_over_nccl_are_those_without_ranks(one_rank, rule):
    assert relative(stepped(rule, DEVICE, sharded=True), stepped(rule, DEVICE)) < 1e-5


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize(
    "rule,settings",
    [("mars-adamw", {}), ("mars-lion", {}), ("mars-m", {}), ("mars-adamw", NARROW)],
)
def test_a_step_does_not_wait_for_the_device(rule, settings, compile):
    torch.manual_seed(0)
    width = sized(512, 32)
    model = nn.Sequential(nn.Linear(width, 2 * width), nn.Linear(2 * width, width)).to(DEVICE)
    matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    optimizer = MARS(matrices, lr=0.01, rule=rule, max_grad_norm=1.0, compile=compile, **settings)
    for step in range(4):
        model(torch.randn(8, width, device=DEVICE)).square().mean().backward()
        if step < 2:  # the first ones make the state, and kernels
            optimizer.step()
        else:
            with without_waiting():
                optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("settings", [{}, NARROW])
def test_a_model_may_move_after_its_optimizer_was_made(settings):
    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    optimizer = MARS([model.weight, model.bias], lr=0.01, rule="mars-adamw", **settings)
    model.to(DEVICE)
    for _ in range(2):
        model(torch.randn(8, 64, device=DEVICE)).square().mean().backward()
        before = model.weight.detach().clone()
        optimizer.step()
        optimizer.zero_grad()
        assert not torch.equal(model.weight, before)
    assert all(
        tensor.device.type == DEVICE.type
        for state in optimizer.state.values()
        for tensor in state.values()
        if tensor.ndim
    )


def test_a_step_reaches_most_of_the_copy_bandwidth():
    """While its kernels run: what the host takes to start them is not in it."""
    found = optimizers.rows(optimizers.torchs_adamw, ["mars-adamw"], [True])
    [row] = [row for row in found if row["step"] == "mars-adamw"]
    if ON_GPU:
        assert row["of copy speed"] > 0.85
