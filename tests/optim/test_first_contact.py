"""What a newcomer does first: bare parameters, default settings, slips. Nothing is silent."""

import copy
import logging
import warnings

import pytest
import torch
from torch import nn

from torchmars.optim import MARS, compiling, param_groups, passes
from torchmars.optim.rules import RULES, MatrixRule


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.up = nn.Embedding(9, 6), nn.Linear(6, 6, bias=False)
        self.lm_head = nn.Linear(6, 9, bias=False)


def caught(function):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        function()
    return [str(each.message) for each in found]


@pytest.mark.parametrize(
    "rule", [name for name, rule in RULES.items() if isinstance(rule, MatrixRule)]
)
def test_an_embedding_for_a_matrix_rule_is_warned_of_once(rule):
    model = Net()
    [bare] = caught(lambda: MARS(model.parameters(), rule=rule))
    assert f"param_groups(model, '{rule}')" in bare and "without names" in bare
    [named] = caught(lambda: MARS(model.named_parameters(), rule=rule))
    assert "'embed.weight'" in named and "param_groups" in named
    [_] = caught(lambda: MARS([{"params": iter([p])} for p in model.parameters()], rule=rule))
    for good in (
        lambda: MARS(param_groups(model, rule), rule=rule),
        lambda: MARS([{"params": [model.up.weight], "rule": rule}]),
        lambda: MARS([("up.weight", model.up.weight)], rule=rule),
    ):
        assert caught(good) == []
    with pytest.raises(ValueError, match=r"'bias' \(1 of group 0\) has shape \(6,\).*param_groups"):
        MARS(nn.Linear(6, 6).named_parameters(), rule=rule)


@pytest.mark.parametrize("rule", RULES)
def test_defaults_are_those_of_the_rule(rule):
    def settings(*args, **kwargs):
        group = MARS(*args, **kwargs).param_groups[0]
        return group["lr"], group["betas"]

    parameter, expected = nn.Parameter(torch.ones(2, 2)), RULES[rule].defaults
    assert settings([parameter], rule=rule) == (expected["lr"], expected["betas"])
    assert settings([{"params": [parameter], "rule": rule}]) == (expected["lr"], expected["betas"])
    assert settings([{"params": [parameter], "rule": rule, "lr": 0.5}], betas=(0.1, 0.2)) == (
        0.5,
        (0.1, 0.2),
    )
    assert MARS([parameter], rule=rule).defaults["lr"] == expected["lr"]


def test_a_schedule_of_adamw_goes_on_after_its_state_is_loaded():
    weight = torch.nn.Parameter(torch.ones(2, 2))
    torchs = torch.optim.AdamW([weight])
    torch.optim.lr_scheduler.LambdaLR(torchs, lambda step: 0.5)
    weight.grad = torch.ones(2, 2)
    torchs.step()
    ours, seen = MARS([weight], rule="adamw"), []
    ours.register_load_state_dict_post_hook(lambda each: seen.append(len(each.state)))
    ours.load_state_dict(torchs.state_dict())
    assert ours.param_groups[0]["initial_lr"] == 1e-3 and seen == [1]
    assert not {"foreach", "fused"} & ours.param_groups[0].keys()


def test_other_keys_of_a_group_are_carried_and_unknown_arguments_refused():
    others = {"initial_lr": 0.1, "lr_scale": 0.5, "max_lr": 1.0, "role": "vector", "mine": "x"}
    optimizer = MARS([{"params": [nn.Parameter(torch.ones(2))], **others}])
    assert {key: optimizer.param_groups[0][key] for key in others} == others
    torch.optim.lr_scheduler.StepLR(optimizer, 1, last_epoch=3)  # needs initial_lr
    with pytest.raises(TypeError, match="unexpected keyword argument 'gama'"):
        MARS([nn.Parameter(torch.ones(2))], gama=0.5)


MISTAKES = [
    (lambda p, q: {"params": [q], "lr": -1.0}, "lr of group 1 must be"),
    (lambda p, q: {"params": [q], "lr": "x"}, "lr of group 1 must be a number, got x"),
    (lambda p, q: {"params": [q], "betas": 0.9}, "betas of group 1 must be numbers"),
    (lambda p, q: {"params": [q], "rule": "sgd"}, "rule must be one of .*muon, got sgd"),
    (lambda p, q: {"params": [q, q]}, "group 1 has one parameter twice"),
    (lambda p, q: {"params": [q, p]}, "more than one parameter group"),
    (lambda p, q: {"params": [q], "rule": "mars-m", "split": 3}, "split"),
    (
        lambda p, q: {"params": [q, nn.Parameter(torch.ones(3))], "rule": "mars-m"},
        "parameter 1 of group 1 .*param_groups",
    ),
    (
        lambda p, q: {"params": [q, torch.ones(2, dtype=torch.int32)]},
        "parameter 1 of group 1 is of torch.int32",
    ),
    (
        lambda p, q: {"params": [q, torch.ones(4, 4)[:, ::2].requires_grad_()]},
        "parameter 1 of group 1 has strides",
    ),
    (lambda p, q: {"params": [("q", q)]}, "with/without names"),
    (lambda p, q: {"params": {q}}, "ordered"),
    (lambda p, q: [q], "must be a dict"),
]


@pytest.mark.parametrize("make,message", MISTAKES)
def test_a_group_that_fails_leaves_the_optimizer_as_it_was(make, message):
    p, q, r = (nn.Parameter(torch.ones(4, 4)) for _ in range(3))
    optimizer = MARS([{"params": [p], "rule": "mars-m"}])
    before = copy.deepcopy((optimizer.state_dict(), optimizer.plans.owner_loads))
    with pytest.raises((ValueError, TypeError), match=message):
        optimizer.add_param_group(make(p, q))
    assert (
        optimizer.plans.owner_loads == before[1]
        and optimizer.state_dict()["param_groups"] == before[0]["param_groups"]
    )
    assert set(optimizer.state) == {p} and len(optimizer.plans.matrices) == 1
    optimizer.add_param_group({"params": [q, r], "rule": "mars-m"})
    for parameter in (p, q, r):
        parameter.grad = torch.eye(4)
    optimizer.step()
    assert torch.equal(p, q) and not torch.equal(p, torch.ones(4, 4))


def test_mistakes_in_the_constructor():
    parameter = nn.Parameter(torch.ones(2))
    for name, wanted in (
        ("last_grad_dtype", "a floating-point dtype"),
        ("momentum_dtype", "a floating-point dtype"),
        ("matrix_dtype", "one of auto, bfloat16, float32"),
    ):
        with pytest.raises(ValueError, match=f"{name} must be {wanted}, got torch.int32"):
            MARS([parameter], **{name: torch.int32})
    with pytest.raises(ValueError, match="group 0 has one parameter twice"):
        MARS([("a", parameter), ("b", parameter)])
    MARS([{"params": []}]).add_param_group({"params": [parameter]})  # as a stage without parameters


def test_compilation_is_announced_once(caplog, monkeypatch):
    """Nothing is compiled here: torch.compile is replaced."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    for cached in (passes._compiled, compiling.announce_compilation):
        cached.cache_clear()
    try:
        optimizers = [
            MARS([nn.Parameter(torch.ones(2**16))], rule=rule, compile=True)
            for rule in ("mars-adamw", "mars-lion")
        ]
        with caplog.at_level(logging.WARNING):
            for optimizer in optimizers:
                assert not caplog.records or optimizer is not optimizers[0]
                optimizer.param_groups[0]["params"][0].grad = torch.ones(2**16)
                optimizer.step(), optimizer.step()
    finally:
        for cached in (passes._compiled, compiling.announce_compilation):
            cached.cache_clear()
    (record,) = [each for each in caplog.records if "compil" in each.getMessage()]
    assert "compile=False" in record.getMessage()
