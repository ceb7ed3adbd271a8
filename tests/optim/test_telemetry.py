"""The numbers that `telemetry` reports; reading them changes nothing."""

import math

import pytest
import torch
from torch import nn

from tests.optim.reference import gradients
from tests.optim.test_mars import run
from tests.optim.test_rules import SHAPES, starts
from torchmars.optim import MARS


def test_telemetry():
    parameters = [nn.Parameter(start) for start in starts(torch.float64)]
    optimizer = MARS([{"params": parameters, "role": "matrix"}], gamma=0.1)
    sequences = [gradients(shape, 20, seed, torch.float64) for seed, shape in enumerate(SHAPES)]
    run(optimizer, parameters, [sequence[:5] for sequence in sequences])
    assert not {"matrix/cosine", "matrix/correction"} & set(optimizer.telemetry())
    optimizer.measure_correction()
    run(optimizer, parameters, [sequence[5:6] for sequence in sequences])
    numbers = optimizer.telemetry()
    g, h = (torch.cat([sequence[step].flatten() for sequence in sequences]) for step in (5, 4))
    kappa = 0.1 * 0.95 / 0.05
    norms = [(sequence[5] + kappa * (sequence[5] - sequence[4])).norm() for sequence in sequences]
    assert numbers["grad_norm"] == pytest.approx(g.norm().item())
    assert numbers["matrix/grad_norm"] == pytest.approx(g.norm().item())
    assert numbers["matrix/cosine"] == pytest.approx((g @ h / g.norm() / h.norm()).item())
    assert numbers["matrix/correction"] == pytest.approx((kappa * (g - h).norm() / g.norm()).item())
    assert numbers["matrix/clipped"] == sum(norm > 1 for norm in norms) / len(norms)
    run(optimizer, parameters, [sequence[6:7] for sequence in sequences])
    assert "matrix/cosine" not in optimizer.telemetry()  # it was announced for one step


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
