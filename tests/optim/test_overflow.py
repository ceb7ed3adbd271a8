"""Gradients and last gradients that are not finite: nothing breaks or stays stuck."""

import copy
import math

import pytest
import torch
from torch import nn

from tests.optim.reference import gradients
from tests.support.steps import meant
from torchmars.optim import MARS
from torchmars.optim.rules import RULES

SHAPES = [(6, 4), (5, 5)]
CORRECTED = [name for name, rule in RULES.items() if rule.variance_reduced]


def build(rule, **settings):
    parameters = [nn.Parameter(torch.ones(shape)) for shape in SHAPES]
    settings = meant(rule, settings)
    return parameters, MARS(parameters, rule=rule, matrix_dtype=torch.float32, **settings)


def give(parameters, step, scale=1.0):
    """Set the gradients of step number `step`, times `scale`."""
    for seed, parameter in enumerate(parameters):
        parameter.grad = gradients(parameter.shape, 8, seed)[step] * scale


def ordinary(rule, steps, before=None, after=0, **settings):
    """Return parameters and optimizer after ordinary steps; `before` runs after `after` of them."""
    parameters, optimizer = build(rule, **settings)
    for step in range(steps):
        if before and step == after:
            before(parameters, optimizer)
        give(parameters, step)
        optimizer.step()
    return parameters, optimizer


def same(parameters, others):
    return all(torch.equal(one, other) for one, other in zip(parameters, others))


def report(optimizer):
    """Return the telemetry of an interval, and start the next one."""
    numbers = optimizer.telemetry()
    optimizer.start_interval()
    return numbers


def finite(optimizer):
    return all(
        value.isfinite().all()
        for parameter, state in optimizer.state.items()
        for value in (parameter, *state.values())
    )


@pytest.mark.parametrize("rule", RULES)
def test_a_large_gradient_is_clipped_and_not_skipped(rule):
    """The norm is summed in float64, so it is known."""
    parameters, optimizer = build(rule, max_grad_norm=1.0)
    before = [parameter.detach().clone() for parameter in parameters]
    for size in (1e30, 5e29):
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, size)
        optimizer.step()
    assert finite(optimizer) and report(optimizer)["skipped_steps"] == 0
    assert not any(map(torch.equal, parameters, before))


@pytest.mark.parametrize("rule", RULES)
def test_a_large_gradient_without_a_clip_is_skipped(rule):
    """Its square is no number of float32, of which second moments are."""
    parameters, optimizer = build(rule, max_grad_norm=None)
    for size in (1e18, 1e20):
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, size)
        optimizer.step()
    give(parameters, 7)
    optimizer.step()
    assert finite(optimizer) and report(optimizer)["skipped_steps"] == 1


@pytest.mark.parametrize("rule", CORRECTED)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_last_grads_start_with_the_first_step_that_counts(rule, bad):
    def start(parameters, optimizer):
        optimizer.skip_next_correction(parameters)

    def start_with_a_bad_gradient(parameters, optimizer):
        give(parameters, 7)
        parameters[0].grad[0, 0] = bad
        optimizer.skip_next_correction(parameters)
        optimizer.step()
        assert report(optimizer)["skipped_in_a_row"] == 1

    wanted, _ = ordinary(rule, 6, start, 3)
    parameters, optimizer = ordinary(rule, 6, start_with_a_bad_gradient, 3)
    uninterrupted, _ = ordinary(rule, 6)
    assert same(parameters, wanted) and not same(parameters, uninterrupted)
    assert optimizer.telemetry()["skipped_steps"] == 1 and finite(optimizer)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_last_gradient_that_broke_is_left_out(bad):
    """A state from elsewhere may have one, by which every step after it would be skipped."""

    def load(parameters, optimizer):
        broken = copy.deepcopy(optimizer.state_dict())
        for state in broken["state"].values():
            state["last_grad"].fill_(bad)
        optimizer.load_state_dict(broken)

    def start(parameters, optimizer):
        optimizer.skip_next_correction(parameters)

    wanted, _ = ordinary("mars-adamw", 6, start, 3)
    parameters, optimizer = ordinary("mars-adamw", 6, load, 3)
    assert same(parameters, wanted) and optimizer.telemetry()["skipped_steps"] == 0


def exact(rule, bad=None, forget=()):
    """Return parameters after six steps in exact mode, with a `bad` look-ahead before step 3.

    Before steps `forget` the last gradients are dropped.
    """
    parameters, optimizer = build(rule, exact=True, max_grad_norm=0.1)
    for step in range(6):
        give(parameters, step + 2)
        if step == 2 and bad is not None:
            parameters[0].grad[0, 0] = bad
        optimizer.look_ahead()
        give(parameters, step)
        if step in forget:
            optimizer.skip_next_correction(parameters)
        optimizer.step()
    assert optimizer.telemetry()["skipped_steps"] == 0
    return parameters


@pytest.mark.parametrize("rule", CORRECTED)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_look_ahead_that_is_not_finite_corrects_nothing(rule, bad):
    """It corrects no tensor: without its norm, the other look-aheads could not be clipped."""
    assert same(exact(rule, bad), exact(rule, forget=[3]))
    assert not same(exact(rule), exact(rule, forget=[3]))
