"""A saved state is loaded whole or not at all; AdamW's goes on as MARS's."""

import copy

import pytest
import torch
from torch import nn

from tests.optim.reference import gradients
from tests.optim.test_state import LR, Net, train
from tests.support.steps import relative, run, whole
from torchmars.optim import MARS


def trained(optimizer_class=MARS, steps=4, **settings):
    model = Net()
    optimizer = optimizer_class(model.named_parameters(), lr=LR, **settings)
    train(model, optimizer, range(steps))
    return model, optimizer


def everything(optimizer):
    """Return a copy of all that loading changes."""
    return copy.deepcopy(optimizer.state_dict())


def assert_same(one, other):
    assert one["param_groups"] == other["param_groups"]
    for state, expected in zip(one["state"].values(), other["state"].values(), strict=True):
        assert state.keys() == expected.keys() and all(
            torch.equal(state[key], expected[key]) for key in state
        )


def spoil_shape(saved):
    saved["state"][1]["exp_avg"] = saved["state"][1]["exp_avg"].T.contiguous()


def spoil_step(saved):
    saved["state"][1]["step"] = torch.ones(2)


def spoil_keys(saved):
    del saved["state"][1]["exp_avg_sq"]


def spoil_rule(saved):
    saved["param_groups"][0]["rule"] = "lion"


def spoil_count(saved):
    saved["param_groups"][0]["params"].pop()


def spoil_groups(saved):
    saved["param_groups"] *= 2


def spoil_lr(saved):
    saved["param_groups"][0]["lr"] = -1.0


def spoil_all(saved):
    saved.clear()


@pytest.mark.parametrize(
    "spoil,message",
    [
        (
            spoil_shape,
            r"parameter 'up.weight' \(1 of group 0\): exp_avg has shape \(6, 11\) in the "
            r"state_dict, here \(11, 6\)",
        ),
        (spoil_step, r"'up.weight' .*: step has shape \(2,\)"),
        (
            spoil_keys,
            r"'up.weight' .* has the state exp_avg, last_grad, step in .* "
            "needs exp_avg, exp_avg_sq, last_grad, step",
        ),
        (spoil_rule, "group 0 of the state_dict is of the rule lion, here it is of mars-adamw"),
        (spoil_count, "group 0 has 4 parameters in the state_dict, 5 in this optimizer"),
        (spoil_groups, "state_dict has 2 parameter groups, this optimizer 1"),
        (spoil_lr, "lr of group 0 must be at least 0"),
        (spoil_all, "must have 'state' and 'param_groups'"),
    ],
)
def test_a_state_that_does_not_fit_changes_nothing(spoil, message):
    _, source = trained(betas=(0.9, 0.9))
    model, optimizer = trained(steps=2)
    before, saved = everything(optimizer), everything(source)
    spoil(saved)
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(saved)
    assert_same(everything(optimizer), before)
    expected_model, expected = trained(steps=2)
    train(model, optimizer, range(2, 4)), train(expected_model, expected, range(2, 4))
    assert all(
        torch.equal(one, other)
        for one, other in zip(whole(model.parameters()), whole(expected_model.parameters()))
    )


def test_hooks_of_others_may_change_what_is_loaded():
    _, source = trained()
    saved = {"wrapped": everything(source)}
    _, optimizer = trained(steps=0)
    optimizer.register_load_state_dict_pre_hook(lambda _, state_dict: state_dict["wrapped"])
    optimizer.load_state_dict(saved)
    assert_same(everything(optimizer), saved["wrapped"])


def test_adamw_goes_on_as_rule_adamw():
    settings = dict(betas=(0.8, 0.9), weight_decay=0.1)
    theirs_model, theirs = trained(torch.optim.AdamW, **settings)
    model = copy.deepcopy(theirs_model)
    optimizer = MARS(model.parameters(), rule="adamw", lr=1.0)
    optimizer.load_state_dict(theirs.state_dict())
    assert {key: optimizer.param_groups[0][key] for key in ("lr", "betas", "rule")} == {
        "lr": LR,
        "betas": (0.8, 0.9),
        "rule": "adamw",
    }
    train(model, optimizer, range(4, 8)), train(theirs_model, theirs, range(4, 8))
    for one, other in zip(whole(model.parameters()), whole(theirs_model.parameters())):
        assert relative(one, other) < 1e-6
    fresh = torch.optim.AdamW(model.parameters())  # without state: no step was made
    optimizer.load_state_dict(fresh.state_dict())
    assert all(not value.any() for state in optimizer.state.values() for value in state.values())


@pytest.mark.parametrize("source", ["torch", "ours"])
@pytest.mark.parametrize("bad_first", [False, True])
def test_mars_goes_on_from_adamw(source, bad_first):
    """It has AdamW's moments, MARS's settings, and a first step without correction."""
    gs = gradients((5, 4), 8, seed=0, dtype=torch.float64)
    parameter = nn.Parameter(torch.ones(5, 4, dtype=torch.float64))
    betas = dict(betas=(0.9, 0.95), weight_decay=0.0)
    adamw = (
        torch.optim.AdamW([parameter], lr=LR, **betas)
        if source == "torch"
        else MARS([parameter], rule="adamw", lr=LR, **betas)
    )
    run(adamw, [parameter], [gs[:4]])
    x, state = (
        parameter.detach().clone(),
        {key: value.clone() for key, value in adamw.state[parameter].items()},
    )
    saved, parameter = adamw.state_dict(), nn.Parameter(x.clone())
    optimizer = MARS([parameter], lr=0.02, clip=None, gamma=0.1)
    optimizer.load_state_dict(saved)
    optimizer.load_state_dict(
        copy.deepcopy(optimizer.state_dict())
    )  # as Accelerate does: it is still marked that h is missing
    assert optimizer.param_groups[0]["lr"] == 0.02 and optimizer.param_groups[0]["betas"] == (
        0.95,
        0.99,
    )
    if bad_first:
        run(optimizer, [parameter], [[torch.full((5, 4), float("nan"))]])
    run(optimizer, [parameter], [gs[4:]])
    m, v, h = state["exp_avg"], state["exp_avg_sq"], gs[4]
    for t, g in enumerate(gs[4:], start=5):
        c = g + 0.1 * 0.95 / 0.05 * (g - h)
        m, v, h = 0.95 * m + 0.05 * c, 0.99 * v + 0.01 * c * c, g
        x = x - 0.02 * (m / (1 - 0.95**t)) / ((v / (1 - 0.99**t)).sqrt() + 1e-8)
    assert relative(parameter, x) < 1e-12


def test_adamw_state_of_another_kind_is_refused():
    for settings, message in (
        (dict(amsgrad=True), "amsgrad=True"),
        (dict(maximize=True), "maximize=True"),
    ):
        _, source = trained(torch.optim.AdamW, **settings)
        for rule in ("adamw", "mars-adamw"):
            with pytest.raises(ValueError, match=message):
                trained(rule=rule)[1].load_state_dict(source.state_dict())
    _, source = trained(torch.optim.AdamW)
    with pytest.raises(ValueError, match="is of the rule adamw, here it is of lion"):
        trained(rule="lion")[1].load_state_dict(source.state_dict())
    with pytest.raises(
        ValueError, match="has the state momentum_buffer in the state_dict, adamw needs"
    ):
        trained(rule="adamw")[1].load_state_dict(
            trained(torch.optim.SGD, momentum=0.9)[1].state_dict()
        )
