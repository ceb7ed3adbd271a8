"""The correction of a part of each batch, against float64 math."""

import pytest
import torch
from torch import nn

from tests.optim.reference import gradients, mars
from tests.optim.test_mars import relative
from tests.optim.test_rules import BASE, MARS_RULES, SHAPES, starts
from torchmars.optim import MARS

STEPS, FRACTION, BETAS, GAMMA = 12, 0.125, (0.9, 0.95), 0.3


def sequences(seed):
    return [
        gradients(shape, STEPS + 1, seed + number, torch.float64)
        for number, shape in enumerate(SHAPES)
    ]


# Of whole batches, of the part at today's weights, and of it at the last ones.
WHOLE, TODAY, LAST = sequences(0), sequences(100), sequences(200)


def fill(parameters, given, step, scale=1.0):
    for parameter, sequence in zip(parameters, given):
        parameter.grad = sequence[step] * scale


@pytest.mark.parametrize("clip", [1.0, None])
@pytest.mark.parametrize("max_grad_norm", [0.7, None])
@pytest.mark.parametrize("rule", MARS_RULES)
def test_it_is_that_of_float64(rule, clip, max_grad_norm):
    parameters = [nn.Parameter(start) for start in starts(torch.float64)]
    settings = {"gamma": GAMMA, "clip": clip, "betas": BETAS, **BASE}
    optimizer = MARS(
        parameters,
        rule=rule,
        exact=True,
        exact_fraction=FRACTION,
        max_grad_norm=max_grad_norm,
        matrix_dtype=torch.float64,
        **settings,
    )
    used: list = [[] for _ in SHAPES]
    lasts: list = [[] for _ in SHAPES]
    for step in range(STEPS):
        fill(parameters, LAST, step + 1)
        optimizer.look_ahead()
        fill(parameters, TODAY, step, FRACTION)
        optimizer.take_subset()
        fill(parameters, WHOLE, step)
        optimizer.step()
        norm = float(torch.cat([g[step].flatten() for g in WHOLE]).norm())
        scale = min(1.0, (max_grad_norm or torch.inf) / (norm + 1e-6))
        for number, g in enumerate(WHOLE):
            used[number].append(g[step] * scale)
            difference = TODAY[number][step] - LAST[number][step]
            lasts[number].append((g[step] - difference) * scale)
    for start, sequence, last, parameter in zip(starts(torch.float64), used, lasts, parameters):
        wanted, _ = mars(start, sequence, rule=rule, last=last, **settings)
        assert relative(parameter, wanted) < 1e-10


def test_an_expert_without_tokens_gets_no_correction_and_a_broken_gradient_none():
    for broken in (False, True):
        parameter = nn.Parameter(torch.zeros(3, 4, 5, dtype=torch.float64))
        settings = dict(rule="mars-m", clip=None, lr=0.1, gamma=GAMMA, exact=True)
        optimizer = MARS(
            [parameter], exact_fraction=FRACTION, matrix_dtype=torch.float64, **settings
        )
        generator = torch.Generator().manual_seed(0)
        before = torch.zeros_like(parameter)
        for step in range(2):
            given = torch.randn(3, 3, 4, 5, generator=generator, dtype=torch.float64)
            parameter.grad = given[0] * (torch.nan if broken else 1)
            optimizer.look_ahead()
            parameter.grad = given[1] * FRACTION
            parameter.grad[2] = 0
            optimizer.take_subset()
            parameter.grad = given[2]
            parameter.grad[2] = 0
            optimizer.step()
            momentum = optimizer.state[parameter]["exp_avg"]
            expected = before * 0.95 + 0.05 * given[2]
            torch.testing.assert_close(momentum[2], expected[2])
            correct = broken or step == 0
            assert torch.allclose(momentum[:2], expected[:2]) == correct
            before = momentum.clone()


def test_what_is_missing_is_named():
    parameter = nn.Parameter(torch.ones(4, 4))
    with pytest.raises(ValueError, match="exact_fraction must be 1 without exact=True"):
        MARS([parameter], exact_fraction=0.5)
    with pytest.raises(ValueError, match="exact_fraction must be at most 1"):
        MARS([parameter], exact=True, exact_fraction=2.0)
    optimizer = MARS([parameter], exact=True, exact_fraction=0.5)
    parameter.grad = torch.ones(4, 4)
    optimizer.look_ahead()
    with pytest.raises(RuntimeError, match="needs take_subset"):
        optimizer.step()
    optimizer.take_subset()
    with pytest.raises(RuntimeError, match="twice"):
        optimizer.take_subset()
    optimizer.step()
    with pytest.raises(RuntimeError, match="needs an exact_fraction below 1"):
        MARS([parameter], exact=True).take_subset()


def test_a_step_that_was_given_up_after_its_part_leaves_nothing():
    """As the guard against loss spikes does, which rolls back in the middle of a step."""
    parameter = nn.Parameter(torch.ones(4, 4))
    optimizer = MARS([parameter], exact=True, exact_fraction=0.5)
    parameter.grad = torch.ones(4, 4)
    for _ in range(2):
        optimizer.look_ahead()
        optimizer.take_subset()
    optimizer.step()
