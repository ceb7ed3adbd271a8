"""The optimizer's kernels on a GPU: against the passes on a CPU, wherever gradients lie."""

import functools

import pytest
import torch

from tests.gpu.device import DEVICE, ON_GPU, sized, without_waiting
from torchmars.optim import MARS
from torchmars.optim.rules import RULES, MatrixRule

pytestmark = pytest.mark.gpu

# A piece, a block and a part of one, one element, none, a stack, and a number of pieces.
SHAPES = [(128, 128), (40, 30), (1,), (0,), (4, 24, 40), (33, 33), sized((600, 500), (9, 7))]
NARROW = {"momentum_dtype": torch.bfloat16, "last_grad_dtype": torch.bfloat16}
STEPS = 4
BROKEN = 1  # the step whose gradient is not finite


def optimized(rule, device, offset=0, dtype=torch.float32, gradients=torch.float32, **settings):
    """Return an optimizer after some steps, on a device.

    Gradients lie `offset` elements behind an address that 16 divides, elsewhere in each step.
    """
    generator = torch.Generator().manual_seed(0)
    parameters = [
        torch.nn.Parameter(torch.randn(shape, generator=generator).to(device, dtype))
        for shape in SHAPES
    ]
    for parameter in parameters:
        parameter.grad_dtype = None  # any
    matrices = isinstance(RULES[rule], MatrixRule)
    own = [each for each in parameters if each.ndim > 1 or not matrices]
    others = [each for each in parameters if each.ndim == 1 and matrices]
    groups = [{"params": own[:2], "lr": 1e-3}, {"params": own[2:], "lr": 2e-3}]
    if others:
        groups.append({"params": others, "rule": "adamw", "lr": 1e-3})
    optimizer = MARS(
        groups, rule=rule, weight_decay=0.1, max_grad_norm=1.0, matrix_dtype="float32", **settings
    )
    kept = []
    for step in range(STEPS):
        for parameter in parameters:
            values = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 3:
                values[1] = 0
            if step == BROKEN and len(values) == 1:
                values.fill_(float("nan"))
            memory = torch.empty(values.numel() + offset, dtype=gradients, device=device)
            parameter.grad = memory[offset:].view(values.shape)
            parameter.grad.copy_(values)
            kept.append(parameter.grad)
        with without_waiting() if step else torch.no_grad():
            optimizer.step()
        optimizer.param_groups[0]["lr"] *= 0.9
    return optimizer


def numbers_of(optimizer):
    """Return weights, state and the rest, on the CPU."""
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    state = [value for each in parameters for value in optimizer.state[each].values()]
    return {
        "weights": [each.detach().cpu().float() for each in parameters],
        "state": [each.cpu().float() for each in state],
        "norm": optimizer.grad_norm.item(),
        "skipped": optimizer.skipped.tolist(),
        "telemetry": optimizer.telemetry(),
    }


@functools.cache
def numbers_on_cpu(rule):
    return numbers_of(optimized(rule, torch.device("cpu")))


def apart(found, wanted):
    """How far numbers are apart, over the largest of their tensor."""
    return max(
        ((one - other).abs().max() / other.abs().max().clamp(min=1e-30)).item()
        for one, other in zip(found, wanted)
        if one.numel()
    )


def check(found, wanted, weights, state, telemetry=1e-6):
    assert found["skipped"] == wanted["skipped"] == [1, 0, 1]
    assert found["norm"] == pytest.approx(wanted["norm"], rel=1e-12)
    assert apart(found["weights"], wanted["weights"]) <= weights
    assert apart(found["state"], wanted["state"]) <= state
    assert found["telemetry"] == pytest.approx(wanted["telemetry"], rel=telemetry)


ULP = 2.0**-23


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("offset", [0, 1, 2])
def test_steps_are_those_of_a_cpu(rule, offset):
    optimizer = optimized(rule, DEVICE, offset)
    assert not ON_GPU or optimizer.launcher is not None
    wanted = numbers_on_cpu(rule)
    # The iteration of Newton and Schulz makes more of the last place, on each device another.
    matrices = isinstance(RULES[rule], MatrixRule)
    check(numbers_of(optimizer), wanted, 1e-4 if matrices else 3 * ULP, 4 * ULP)


@pytest.mark.parametrize("rule", ["mars-adamw", "mars-lion", "mars-m", "muon", "adamw", "lion"])
def test_settings_and_dtypes_are_those_of_a_cpu(rule):
    found = optimized(rule, DEVICE, 3, gradients=torch.bfloat16, **NARROW)
    wanted = optimized(rule, torch.device("cpu"), gradients=torch.bfloat16, **NARROW)
    # One in many thousands is rounded to the other bfloat16; a sign may turn with it.
    check(numbers_of(found), numbers_of(wanted), 4e-3, 2.0**-7, telemetry=1e-3)


def test_weights_in_bfloat16_are_those_of_a_cpu():
    form = {"dtype": torch.bfloat16, "gradients": torch.bfloat16}
    found = numbers_of(optimized("mars-adamw", DEVICE, **form))
    wanted = numbers_of(optimized("mars-adamw", torch.device("cpu"), **form))
    check(found, wanted, 2.0**-7, 2.0**-7, telemetry=1e-3)


@pytest.mark.parametrize("rule", ["mars-adamw", "mars-m", "lion"])
def test_each_run_has_the_same_bits(rule):
    first, second = (numbers_of(optimized(rule, DEVICE, offset)) for offset in (0, 1))
    assert first["norm"] == second["norm"]
    for name in ("weights", "state"):
        assert all(map(torch.equal, first[name], second[name])), name


@pytest.mark.parametrize("in_float64", [True, False])
def test_sums_are_those_of_float64(in_float64, monkeypatch):
    from torchmars.optim.gpu import launches

    monkeypatch.setattr(launches, "sums_in_float64", lambda device: in_float64)
    parameter = torch.nn.Parameter(torch.zeros(sized(10**7 + 3, 5000), device=DEVICE))
    parameter.grad = torch.randn_like(parameter) * torch.logspace(
        -6, 0, len(parameter), device=DEVICE
    )
    optimizer = MARS([parameter], rule="mars-adamw")
    optimizer.step()
    wanted = parameter.grad.double().norm().item()
    assert optimizer.grad_norm.item() == pytest.approx(wanted, rel=1e-12)


def test_state_that_moves_is_followed():
    optimizer, still = (optimized("mars-adamw", DEVICE) for _ in range(2))
    for state in optimizer.state.values():
        for name, value in state.items():
            state[name] = value.clone()
    parameters, others = ([*each.state] for each in (optimizer, still))
    for parameter, other in zip(parameters, others):
        parameter.data = parameter.data.clone()
        parameter.grad = other.grad.clone()
    for each in (optimizer, still):
        each.step()
    assert all(map(torch.equal, parameters, others))
    versions = [each._version for each in parameters]
    optimizer.step()
    if ON_GPU:  # autograd is told what kernels write
        assert all(before < each._version for before, each in zip(versions, parameters))


def test_a_captured_graph_takes_the_passes():
    if not ON_GPU:
        pytest.skip("graphs are captured on GPUs")
    from torchmars.optim.compiling import is_capturing

    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        assert is_capturing(DEVICE)
        torch.zeros(1, device=DEVICE)
    assert not is_capturing(DEVICE)
