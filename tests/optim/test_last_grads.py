"""A step that reads only the last gradients that have a say: the same as one that reads all."""

import copy
import math
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

import torchmars.optim.mars as mars_module
from tests.optim.reference import gradients
from tests.support.ranks import run_ranks
from torchmars.optim import MARS
from torchmars.optim.rules.rule import SQUARED_NORM
from torchmars.optim.tensors import local_part

# The first tensor has most of the gradient, as a tied table often has.
SHAPES, SIZES = [(37, 11), (64,), (3, 5, 7), (8, 6)], (5.0, 0.4, 0.6, 1.0)
STEPS = 14


def laid_out(whole, mesh):
    return whole if mesh is None else distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)


def start(mesh, **settings):
    parameters = [
        nn.Parameter(laid_out(torch.randn(shape, generator=torch.Generator().manual_seed(9)), mesh))
        for shape in SHAPES
    ]
    return parameters, MARS(parameters, max_grad_norm=1.5, **settings)


def give(parameters, mesh, step):
    """Set the gradients of a step: some break, some are missing, on all ranks or on some."""
    for number, parameter in enumerate(parameters):
        whole = gradients(SHAPES[number], STEPS + 2, number)[step] * SIZES[number]
        parameter.grad = laid_out(whole, mesh)
    rank = dist.get_rank() if mesh is not None else 0
    if step == 3 and rank == 0:
        local_part(parameters[1].grad)[0] = math.nan
    if step in (5, 6):
        parameters[2].grad = None
    if step == 8 and rank == 1:
        parameters[1].grad = None


def change(optimizer, parameters, step):
    """Let settings follow a schedule, and use the optimizer's other verbs."""
    group = optimizer.param_groups[0]
    group["gamma"], group["betas"] = 0.025 + 0.01 * (step % 3), (0.95 - 0.01 * (step % 4), 0.99)
    if step == 9:
        optimizer.skip()
    if step in (3, 10):  # a step that does not count leaves it for the next
        optimizer.skip_next_correction(parameters[:2])
    if step == 11:
        optimizer.measure_correction()


def train(mesh=None, first=True, resume_at=None, **settings):
    """Make all steps. `first`: see g before h is read, or read both at once.

    Return the optimizer, and how many last gradients each step had to read.
    """
    parameters, optimizer = start(mesh, **settings)
    optimizer.decides_on_host = first
    counts = []

    def counted(*args):
        chosen = must_be_read(*args)
        counts.append(len(chosen))
        return chosen

    must_be_read = mars_module.must_be_read
    with patch.object(mars_module, "must_be_read", counted):
        for step in range(STEPS):
            if step == resume_at:
                saved = copy.deepcopy(optimizer.state_dict())
                weights = [p.detach().clone() for p in parameters]
                parameters, optimizer = start(mesh, **settings)
                optimizer.decides_on_host = first
                for parameter, weight in zip(parameters, weights):
                    parameter.data = weight
                optimizer.load_state_dict(saved)
                if optimizer.exact:  # what a run does: the look-ahead was of other data
                    optimizer.skip_next_correction(parameters)
            if optimizer.exact:
                give(parameters, mesh, step + 1)
                optimizer.look_ahead()
            change(optimizer, parameters, step)
            if step == 9 and optimizer.exact:
                give(parameters, mesh, step + 1)
                optimizer.look_ahead()
            give(parameters, mesh, step)
            optimizer.step()
            check_known_norms(optimizer, mesh)
    return optimizer, counts


def check_known_norms(optimizer, mesh):
    """Where the norm of h is known, it is that of h but for the rounding of h."""
    for state in optimizer.state.values():
        if "last_grad" in state and state[SQUARED_NORM].isfinite():
            h = state["last_grad"]
            whole = (h if mesh is None else h.full_tensor()).double()
            eps = torch.finfo(h.dtype).eps
            assert whole.norm().item() == pytest.approx(
                state[SQUARED_NORM].sqrt().item(), rel=2 * eps, abs=1e-30
            )


def tensors(optimizer):
    """Return this rank's part of weights and state, but for what is known of h."""
    return [
        local_part(value).clone()
        for parameter, state in optimizer.state.items()
        for value in (parameter, *(v for key, v in state.items() if key != SQUARED_NORM))
    ]


def same(optimizer, other):
    pairs = zip(tensors(optimizer), tensors(other), strict=True)
    return all(torch.equal(one, two) for one, two in pairs)


CASES = [
    {},
    {"last_grad_dtype": torch.bfloat16},
    {"exact": True},
    {"clip": None},
    {"rule": "mars-lion", "exact": True, "last_grad_dtype": torch.bfloat16},
]


def cases(mesh=None):
    """Return for each case whether all ways agree, and how many tensors the steps read."""
    result = []
    for settings in CASES:
        for resume_at in (None, 7):
            optimizer, counts = train(mesh, resume_at=resume_at, **settings)
            always, none = train(mesh, first=False, resume_at=resume_at, **settings)
            assert not none
            result.append((same(optimizer, always), counts))
    return result


def on_two_ranks():
    mesh = init_device_mesh("cpu", (2,))
    return cases(mesh), collectives(mesh)


def collectives(mesh):
    """Return the all-reduces of steps with gradients so small and so large."""
    parameters, optimizer = start(mesh)
    result = []
    for size in (1e-3, 1e-3, 10.0):
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, size)
        with CommDebugMode() as counted:
            optimizer.step()
        result.append(counted.get_total_counts())
    return result


def check(result):
    for (agrees, counts), settings in zip(result, [each for each in CASES for _ in range(2)]):
        assert agrees, settings
        assert min(counts) < len(SHAPES), settings
        # Without a clip only an h of which nothing is known has a say.
        assert (counts.count(0) > 8) == (settings.get("clip", 1.0) is None), (settings, counts)


def test_what_is_read_changes_no_bit():
    check(cases())


def test_what_is_read_changes_no_bit_on_shards():
    for result, counts in run_ranks(on_two_ranks, 2):
        check(result)
        assert counts == [1, 1, 2]


def test_the_reference_step_by_step():
    """The clip is that of the reference on tensors whose h is read, and on those whose is not."""
    from torchmars.optim.reference import mars_adamw

    settings = dict(lr=1e-2, betas=(0.95, 0.99), eps=1e-8, weight_decay=0.1)
    settings |= dict(gamma=0.05, clip=1.0)
    starts = [torch.ones(shape, dtype=torch.float64) for shape in SHAPES]
    parameters = [nn.Parameter(each.clone()) for each in starts]
    optimizer, states = MARS(parameters, **settings), [{} for _ in SHAPES]
    for step in range(STEPS):
        for number, parameter in enumerate(parameters):
            parameter.grad = gradients(SHAPES[number], STEPS, number, torch.float64)[step]
            parameter.grad *= SIZES[number]
            mars_adamw(starts[number], parameter.grad, states[number], **settings)
        optimizer.step()
        for parameter, expected in zip(parameters, starts):
            torch.testing.assert_close(parameter.detach(), expected, rtol=1e-12, atol=1e-12)


def test_a_state_of_an_earlier_release_reads_each_last_gradient_once():
    optimizer, _ = train(clip=None)
    saved = copy.deepcopy(optimizer.state_dict())
    for state in saved["state"].values():
        del state[SQUARED_NORM]
    parameters, loaded = start(None, clip=None)
    loaded.load_state_dict(saved)
    assert all(state[SQUARED_NORM].isnan() for state in loaded.state.values())
    for parameter, of_saved in zip(parameters, optimizer.state):
        parameter.data = of_saved.detach().clone()
    counts = []
    for step in (1, 2):
        for each in (optimizer, loaded):
            give(list(each.state), None, step)
            before = mars_module.must_be_read

            def counted(*args, before=before):
                chosen = before(*args)
                counts.append(len(chosen))
                return chosen

            with patch.object(mars_module, "must_be_read", counted):
                each.step()
    assert counts == [0, len(SHAPES), 0, 0] and same(optimizer, loaded)
