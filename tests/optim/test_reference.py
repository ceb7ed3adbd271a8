"""`MARS`, the reference that ships with it, and the independent float64 one agree."""

import pytest
import torch
from torch import nn

from tests.optim.reference import gradients, lion, mars, muon
from tests.support.steps import BASE, MARS_RULES, MATRICES, relative, starts, train
from torchmars.optim import MARS
from torchmars.optim.reference import REFERENCES, global_clip
from torchmars.optim.rules import RULES, MatrixRule

STEPS = 20
BETAS = (0.9, 0.95)
MARS_SETTINGS = {"gamma": 0.1, "betas": BETAS}


def settings_of(rule, clip):
    """Return what the reference of `rule` takes beside lr and weight decay."""
    settings = {"betas": BETAS}
    if RULES[rule].variance_reduced:
        settings |= {"gamma": 0.1, "clip": clip}
    if "adamw" in rule:
        settings |= {"eps": 1e-8}
    return settings


# What a matrix rule may do with its directions.
OPTIONS = [
    {"orthogonalize": "polar-express"},
    {"equilibrate": True},
    {"zero_mean": True},
    {"orthogonalize": "deepseek-v4", "equilibrate": True},
    {"orthogonalize": "cubic5", "equilibrate": True},
    {"orthogonalize": "polar-express", "equilibrate": True},
]


def shipped(rule, dtype, settings, lasts=None):
    """Return the parameters after all steps of the reference that ships."""
    result = []
    for seed, x in enumerate(starts(MATRICES, dtype)):
        state = {}
        for step, g in enumerate(gradients(x.shape, STEPS, seed, dtype)):
            last = {"last": lasts[seed][step].to(dtype)} if lasts else {}
            REFERENCES[rule](x, g, state, **BASE, **settings, **last)
        result.append(x)
    return result


def independent(rule, dtype, clip, lasts=None, **options):
    """Return the parameters after all steps of the independent float64 reference."""
    result = []
    for seed, start in enumerate(starts(MATRICES, dtype)):
        sequence = gradients(start.shape, STEPS, seed, dtype)
        if rule == "lion":
            result.append(lion(start, sequence, betas=BETAS, **BASE))
        elif rule == "muon":
            result.append(muon(start, sequence, momentum=BETAS[0], **BASE, **options))
        elif rule == "adamw":
            off = {"rule": "mars-adamw", "gamma": 0.0, "clip": None}
            x, _ = mars(start, sequence, betas=BETAS, **off, **options)
            result.append(x)
        else:
            last = lasts[seed] if lasts else None
            settings = MARS_SETTINGS | options | {"clip": clip, "last": last}
            x, _ = mars(start, sequence, rule=rule, **settings)
            result.append(x)
    return result


def tolerance(rule, dtype):
    if dtype == torch.float32:
        return 1e-5 if isinstance(RULES[rule], MatrixRule) else 2e-6
    return 1e-7 if rule in ("muon", "adamw") else 1e-11


def test_every_rule_has_a_reference():
    assert list(REFERENCES) == list(RULES)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("clip", [1.0, None])
def test_three_implementations_of_a_rule_agree(rule, dtype, clip):
    settings = settings_of(rule, clip)
    parameters, _ = train(rule, dtype, STEPS, **settings)
    theirs = shipped(rule, dtype, settings), independent(rule, dtype, clip)
    for ours, reference, other in zip(parameters, *theirs):
        assert relative(ours, reference) < tolerance(rule, dtype)
        assert relative(reference, other) < tolerance(rule, dtype)


MATRIX_RULES = [name for name, rule in RULES.items() if isinstance(rule, MatrixRule)]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rule", MATRIX_RULES)
def test_they_agree_with_every_option_of_matrices(rule, dtype, options):
    settings = settings_of(rule, None)
    parameters, _ = train(rule, dtype, STEPS, **settings, **options)
    theirs = (
        shipped(rule, dtype, settings | {"options": options}),
        independent(rule, dtype, None, **options),
    )
    # Later polynomials make more of what rounding leaves of a singular value.
    most = tolerance(rule, dtype) * (10 if dtype == torch.float32 else 1)
    for ours, reference, other in zip(parameters, *theirs):
        assert relative(ours, reference) < most
        assert relative(reference, other) < most


@pytest.mark.parametrize("rule", MARS_RULES)
@pytest.mark.parametrize("clip", [1.0, None])
def test_they_agree_in_exact_mode(rule, clip):
    dtype = torch.float64
    lasts = [gradients(shape, STEPS + 1, seed + 50, dtype) for seed, shape in enumerate(MATRICES)]

    def look_ahead(optimizer, step):
        for parameter, last in zip(optimizer.param_groups[0]["params"], lasts):
            parameter.grad = last[step + 1].clone()
        optimizer.look_ahead()

    settings = settings_of(rule, clip)
    parameters, optimizer = train(rule, dtype, STEPS, before=look_ahead, exact=True, **settings)
    theirs = shipped(rule, dtype, settings, lasts), independent(rule, dtype, clip, lasts)
    for ours, reference, other in zip(parameters, *theirs):
        assert relative(ours, reference) < 1e-11 and relative(reference, other) < 1e-11
    with pytest.raises(RuntimeError, match="look_ahead"):
        optimizer.step()


def test_the_global_clip_of_the_reference_is_that_of_mars():
    parameters = [nn.Parameter(start) for start in starts(MATRICES, torch.float64)]
    optimizer = MARS(parameters, clip=None, max_grad_norm=0.7, **BASE, **MARS_SETTINGS)
    wholes, states = starts(MATRICES, torch.float64), [{} for _ in MATRICES]
    settings = settings_of("mars-adamw", None)
    sequences = [
        gradients(shape, STEPS, seed, torch.float64) for seed, shape in enumerate(MATRICES)
    ]
    for given in zip(*sequences):
        for parameter, gradient in zip(parameters, given):
            parameter.grad = gradient.clone()
        optimizer.step()
        for x, g, state in zip(wholes, global_clip(given, 0.7), states):
            REFERENCES["mars-adamw"](x, g, state, **BASE, **settings)
    assert optimizer.grad_norm > 0.7
    for ours, reference in zip(parameters, wholes):
        assert relative(ours, reference) < 1e-11


@pytest.mark.parametrize("rule", RULES)
def test_the_reference_takes_any_dtype(rule):
    settings = settings_of(rule, 1.0) | {"lr": 0.1, "weight_decay": 0.1}
    for dtype in (torch.bfloat16, torch.float16):
        x, state = torch.ones(4, 6, dtype=dtype), {}
        REFERENCES[rule](x, torch.ones_like(x), state, **settings)
        assert x.dtype == dtype and x.isfinite().all() and (x < 1).all()
        assert all(value.dtype == dtype for key, value in state.items() if key != "step")
