"""The numbers that `telemetry` reports; reading them changes nothing."""

import math

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.optim.numbers import numbers_apart
from tests.optim.reference import gradients
from tests.support.ranks import run_ranks
from torchmars.optim import MARS
from torchmars.optim.rules import RULES

# Two matrices of each role, that a tensor parallel layer shards by rows and by columns.
SHAPES, STEPS = ((8, 6), (6, 4)), 5
LAYOUTS = {"FSDP": ([Shard(0)], [Shard(0)]), "TP": ([Shard(0)], [Shard(1)])}


def groups_of_all_rules(exact):
    """Return the settings of a group of each rule, and of each that has another form unclipped."""
    clips = [(rule, clip) for rule in RULES for clip in (1.0, None)]
    return [
        {"rule": rule, "role": f"{rule}, {clip}", "clip": clip, "gamma": 0.05, "exact": exact}
        | {"betas": (0.9, 0.99) if rule == "adamw" else (0.95, 0.98)}
        for rule, clip in clips
        if clip is None or RULES[rule].variance_reduced
    ]


def given(seed):
    """Return gradients [step][group][tensor] whose sizes differ by rows, tensors and groups."""
    rows = torch.tensor([1.0, 0.1, 0.02, 0.001, 3.0, 0.5, 0.1, 2.0])[:, None]
    sequences = [
        [
            gradients(shape, STEPS, seed + 10 * number + place, torch.float64)
            for place, shape in enumerate(SHAPES)
        ]
        for number in range(len(groups_of_all_rules(False)))
    ]
    return [
        [[(g[step] * rows[: len(g[step])]).float() for g in group] for group in sequences]
        for step in range(STEPS)
    ]


def telemetry_of_all_rules(layout, exact):
    """Return the telemetry after STEPS steps on the ranks of a layout; None: on whole tensors."""
    mesh = None if layout is None else init_device_mesh("cpu", (2,))

    def laid_out(whole, place):
        if mesh is None:
            return whole.clone()
        return distribute_tensor(whole, mesh, LAYOUTS[layout][place], src_data_rank=None)

    groups = [
        {key: value for key, value in group.items() if key != "exact"}
        | {
            "params": [
                nn.Parameter(laid_out(torch.ones(shape), place))
                for place, shape in enumerate(SHAPES)
            ]
        }
        for group in groups_of_all_rules(exact)
    ]
    optimizer = MARS(groups, max_grad_norm=4.0, exact=exact)
    steps, ahead = given(0), given(1000)

    def give(step):
        for group, of_group in zip(groups, step):
            for place, (parameter, gradient) in enumerate(zip(group["params"], of_group)):
                parameter.grad = laid_out(gradient, place)

    for number in range(STEPS):
        if exact:
            if number + 1 < STEPS:
                give(ahead[number + 1])
            optimizer.look_ahead()
        give(steps[number])
        optimizer.step()
    return optimizer.telemetry()


CASES = [(layout, exact) for layout in LAYOUTS for exact in (False, True)]


def on_two_ranks():
    return [telemetry_of_all_rules(*case) for case in CASES]


@pytest.fixture(scope="module")
def numbers():
    """The telemetry of each case, on each of its ranks."""
    of_ranks = run_ranks(on_two_ranks, 2)
    found = {case: list(each) for case, each in zip(CASES, zip(*of_ranks))}
    return found | {(None, exact): [telemetry_of_all_rules(None, exact)] for exact in (False, True)}


@pytest.mark.parametrize("layout", [None, *LAYOUTS])
@pytest.mark.parametrize("exact", [False, True])
def test_every_number_of_every_rule_is_that_of_whole_tensors(numbers, layout, exact):
    ahead = given(1000) if exact else None
    expected = numbers_apart(groups_of_all_rules(exact), given(0), 4.0, ahead)
    for found in numbers[layout, exact]:
        assert found == pytest.approx(expected, rel=1e-5)
    assert {0.0, 0.5, 1.0} >= {expected[name] for name in expected if name.endswith("/clipped")}
    assert any(expected[name] for name in expected if name.endswith("/clipped"))


def test_a_number_that_cannot_be_known_is_not_zero():
    parameters = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    groups = [{"params": [p], "rule": rule} for p, rule in zip(parameters, ("lion", "mars-adamw"))]
    optimizer = MARS(groups)
    for size in (1.0, math.nan):
        for parameter in parameters:
            parameter.grad = torch.full((3,), size)
        optimizer.step()
    numbers = optimizer.telemetry()
    assert numbers.pop("skipped_steps") == numbers.pop("skipped_in_a_row") == 1
    assert numbers.pop("mars-adamw/clipped") == 0
    assert all(map(math.isnan, numbers.values()))


def test_reading_changes_nothing_and_an_interval_starts_by_its_own_verb():
    parameter = nn.Parameter(torch.ones(3))
    optimizer = MARS([parameter])

    def step(value):
        parameter.grad = torch.full((3,), value)
        optimizer.step()

    def longest_row():
        before = optimizer.skipped.clone()
        numbers = optimizer.telemetry()
        assert optimizer.telemetry() == pytest.approx(numbers, nan_ok=True)
        assert torch.equal(optimizer.skipped, before)
        return numbers["skipped_in_a_row"]

    for value in (math.nan, math.nan, 1.0, math.nan):
        step(value)
    assert longest_row() == 2
    optimizer.start_interval()
    assert longest_row() == 0
    step(math.nan)
    assert longest_row() == 2  # the row that had begun counts whole
    step(1.0)
    optimizer.start_interval()
    step(1.0)
    assert longest_row() == 0 and optimizer.skipped.tolist() == [4, 0, 0]
    assert optimizer.skipped.dtype == torch.int64
