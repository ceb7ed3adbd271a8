"""Wrong input is one clear error, and has changed nothing then."""

import copy
import math

import pytest
import torch
from torch import nn

from torchmars.optim import MARS, param_groups
from torchmars.optim.rules import RULES

NAN = math.nan


def made(rule="mars-adamw", **settings):
    """Return a parameter with a gradient, and its optimizer after a step."""
    parameter = nn.Parameter(torch.ones(4, 4))
    optimizer = MARS([{"params": [parameter], "rule": rule}], **settings)
    parameter.grad = torch.ones(4, 4)
    optimizer.step()
    return parameter, optimizer


def refused(call, message, *errors):
    """`call` raises one of `errors`, in a line that has `message`."""
    with pytest.raises(errors or (ValueError, TypeError), match=message) as found:
        call()
    assert "\n" not in str(found.value) and len(str(found.value)) < 300


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    "dtype,other", [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)]
)
def test_gradients_of_another_dtype_are_taken(rule, dtype, other):
    """A step is then that of the same gradients in the parameter's dtype."""
    torch.manual_seed(0)
    gradients = [torch.randn(4, 4).bfloat16() for _ in range(3)]
    results = []
    for given in (other, dtype):
        parameters = [nn.Parameter(torch.full((4, 4), 0.5, dtype=dtype)) for _ in range(2)]
        groups = [{"params": [p], "rule": r} for p, r in zip(parameters, ("mars-lion", rule))]
        optimizer = MARS(groups, lr=0.1, max_grad_norm=1.0, matrix_dtype="float32")
        for gradient in gradients:
            for parameter in parameters:
                parameter.grad_dtype = None  # whatever it is given
                parameter.grad = gradient.to(given)
            optimizer.step()
        results.append(parameters)
    for mine, wanted in zip(*results):
        torch.testing.assert_close(mine, wanted, rtol=2e-2, atol=1e-2)
        assert not torch.equal(mine, torch.full_like(mine, 0.5))


SETTINGS = [
    *(("lr", value) for value in (NAN, math.inf, -1.0, None, "x", 10**400, 1j)),
    *(("lr", value) for value in (torch.tensor(NAN), torch.tensor([1.0, 2.0]))),
    *((key, NAN) for key in ("eps", "weight_decay", "gamma", "gamma_next", "clip")),
    *(("eps", 0.0), ("weight_decay", -0.1), ("gamma", -0.1), ("clip", 0.0), ("clip", -1.0)),
    *(("betas", value) for value in ([], 0.9, (NAN, 0.9), (0.9,), (1.0, 0.9), (0.9, -0.1), None)),
    *(("split", value) for value in (-1, 0, 1.5, True, "2", None, (), (2, -1))),
    *(("rule", value) for value in ("x", None, [])),
    ("flatten", "no"),
]


@pytest.mark.parametrize("key,value", SETTINGS)
def test_a_setting_out_of_range(key, value):
    """It is refused by the constructor, by a step, where a schedule may set it, and by loading."""
    if (key, value) not in (("lr", None), ("betas", None)):  # that is the default
        refused(lambda: MARS([nn.Parameter(torch.ones(4, 4))], **{key: value}), key)
    group = {"params": [nn.Parameter(torch.ones(4, 4))], key: value}
    refused(lambda: MARS([group]), key)
    parameter, optimizer = made()
    before, saved = parameter.detach().clone(), copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0][key] = value
    refused(lambda: optimizer.load_state_dict(saved), key, ValueError)
    optimizer.param_groups[0][key] = value
    refused(optimizer.step, f"{key} of group 0", ValueError)
    assert torch.equal(parameter, before) and optimizer.skipped.tolist() == [0, 0, 0]


def test_a_rule_cannot_be_changed():
    _, optimizer = made("mars-lion")
    optimizer.param_groups[0]["rule"] = "mars-m"  # of the same buffers
    refused(optimizer.step, "rule of group 0 was 'mars-lion'", ValueError)


def test_a_state_on_the_meta_device_and_what_is_no_state_dict():
    _, optimizer = made()
    before, saved = (copy.deepcopy(optimizer.state_dict()) for _ in range(2))
    saved["state"][0]["exp_avg"] = torch.ones(4, 4, device="meta")
    refused(
        lambda: optimizer.load_state_dict(saved), "parameter 0 of group 0: exp_avg is on the meta"
    )
    refused(lambda: optimizer.load_state_dict({}), "state_dict must have", ValueError)
    for name, kept in optimizer.state_dict()["state"][0].items():
        assert torch.equal(kept, before["state"][0][name])


ARGUMENTS = [
    *((key, "bfloat16") for key in ("momentum_dtype", "last_grad_dtype")),
    *((key, torch.float8_e4m3fn) for key in ("momentum_dtype", "last_grad_dtype")),
    *((key, torch.int32) for key in ("momentum_dtype", "matrix_dtype")),
    *(("max_grad_norm", value) for value in (NAN, -1, "x")),
]


@pytest.mark.parametrize("key,value", ARGUMENTS)
def test_an_argument_of_the_constructor(key, value):
    refused(lambda: MARS([nn.Parameter(torch.ones(4, 4))], **{key: value}), key)


def test_groups_of_another_shape():
    refused(lambda: MARS([{"lr": 1.0}]), "group 0 has no 'params'", ValueError)


LAYER = nn.Linear(2, 2)


@pytest.mark.parametrize(
    "call,message",
    [
        *((lambda given=given: MARS(given), "params must be") for given in (None, 3, LAYER)),
        (lambda: MARS([[LAYER.weight]]), "can only optimize Tensors"),
        (lambda: MARS([{"params": None}]), "params must be"),
        (lambda: MARS([torch.ones(4, 6).T.requires_grad_()], rule="muon"), "contiguous"),
        *(
            (
                lambda split=split: MARS(
                    [nn.Parameter(torch.ones(4, 4))], rule="muon", split=split
                ),
                "split = .* does not divide the 4 rows",
            )
            for split in (3, (2, 3))
        ),
        *((lambda given=given: param_groups(LAYER, given), "name must be") for given in ([], {})),
        (lambda: param_groups(LAYER, lr=10**400), "lr must be"),
        (lambda: param_groups(LAYER, clip=torch.ones(2)), "clip must be"),
        (lambda: param_groups(LAYER, by_role={"matrix": {"clip": torch.ones(2)}}), "clip must be"),
    ],
)
def test_arguments_of_another_kind(call, message):
    refused(call, message)


def test_a_group_without_parameters_steps():
    optimizer = MARS([{"params": []}])
    optimizer.step()
    assert optimizer.telemetry()["grad_norm"] == 0


def test_parameters_of_others_have_no_correction_to_skip():
    parameter, optimizer = made()
    for given in ([nn.Parameter(torch.ones(2))], parameter, ["weight"]):
        refused(lambda given=given: optimizer.skip_next_correction(given), "of this optimizer")
    assert len(optimizer.state) == 1


def test_an_optimizer_made_before_to_empty_does_not_step():
    with torch.device("meta"):
        model = nn.Linear(3, 3)
    optimizer = MARS(model.parameters())
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    refused(optimizer.step, "make the optimizer after to_empty", ValueError)
