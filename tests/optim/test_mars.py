"""MARS on plain tensors: without correction as torch's AdamW, and an optimizer of torch's kind."""

import copy

import pytest
import torch
from torch import nn

from tests.optim.reference import gradients, mars
from tests.support.steps import relative, run, starts
from torchmars.optim import MARS

SETTINGS = dict(lr=6e-3, betas=(0.95, 0.99), eps=1e-8, weight_decay=0.1, gamma=0.025, clip=1.0)
SHAPES = [(37, 11), (64,), (3, 5, 7), ()]


@pytest.mark.parametrize("rule", [{"gamma": 0.0, "clip": None}, {"rule": "adamw"}])
def test_equals_torch_adamw_without_correction(rule):
    sequences = [gradients(shape, 20, seed) for seed, shape in enumerate(SHAPES)]
    settings = {key: SETTINGS[key] for key in ("lr", "betas", "eps", "weight_decay")}
    ours, theirs = ([nn.Parameter(start.clone()) for start in starts(SHAPES)] for _ in range(2))
    run(MARS(ours, **settings, **rule), ours, sequences)
    run(torch.optim.AdamW(theirs, **settings), theirs, sequences)
    for mine, other in zip(ours, theirs):
        assert relative(mine, other) < 1e-6


def test_correction_survives_in_place_zeroing():
    """`last_grad` must not share memory with a gradient.

    The correction would vanish from step 2 on.
    """
    parameter = nn.Parameter(torch.zeros(8))
    optimizer = MARS([parameter], lr=1e-3)
    parameter.grad = torch.arange(8.0)
    optimizer.step()
    last = optimizer.state[parameter]["last_grad"]
    assert torch.equal(last, torch.arange(8.0))
    assert torch.equal(parameter.grad, torch.arange(8.0))  # the step leaves the gradient as it was
    optimizer.zero_grad(set_to_none=False)
    assert torch.equal(last, torch.arange(8.0))


def test_state_is_complete_before_the_first_step():
    model = nn.Linear(4, 3)
    optimizer = MARS(model.named_parameters())
    for parameter in model.parameters():
        state = optimizer.state[parameter]
        assert set(state) == {"step", "exp_avg", "exp_avg_sq", "last_grad"}
        assert all(torch.is_tensor(value) for value in state.values())


def test_state_dict_round_trip_continues_bit_for_bit():
    sequence = gradients((6, 5), 20, seed=1)
    straight, stopped = nn.Parameter(torch.ones(6, 5)), nn.Parameter(torch.ones(6, 5))
    run(MARS([straight], **SETTINGS), [straight], [sequence])
    optimizer = MARS([stopped], **SETTINGS)
    run(optimizer, [stopped], [sequence[:7]])
    saved = copy.deepcopy(optimizer.state_dict())
    resumed = nn.Parameter(stopped.detach().clone())
    optimizer = MARS([resumed])  # its settings come with the state
    optimizer.load_state_dict(saved)
    run(optimizer, [resumed], [sequence[7:]])
    assert torch.equal(straight, resumed)


def test_closure_scheduler_and_missing_gradients():
    used, unused = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    optimizer = MARS([used, unused], lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)

    def closure():
        optimizer.zero_grad()
        loss = used.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 3.0
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.05
    assert (used < 1).all()
    assert torch.equal(unused, torch.ones(3))
    assert optimizer.state[unused]["step"] == 0
    before = used.detach().clone()
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step(closure)
    assert torch.equal(used, before)


def test_groups_have_their_own_settings():
    tensors = [nn.Parameter(torch.full((4,), 2.0)) for _ in range(3)]
    optimizer = MARS(
        [
            {"params": tensors[:1], "gamma": 0.3},
            {"params": tensors[1:2], "rule": "adamw", "lr": 1e-2},
            {"params": tensors[2:], "clip": None},
        ],
        lr=1e-3,
        betas=SETTINGS["betas"],
        weight_decay=0.0,
    )
    sequences = [gradients((4,), 5, seed=3)] * 3
    run(optimizer, tensors, sequences)
    for tensor, settings in zip(
        tensors, [{"gamma": 0.3}, {"gamma": 0.0, "clip": None, "lr": 1e-2}, {"clip": None}]
    ):
        expected, _ = mars(
            torch.full((4,), 2.0),
            sequences[0],
            **(SETTINGS | {"lr": 1e-3, "weight_decay": 0.0} | settings),
        )
        assert relative(tensor, expected) < 1e-6
    assert "last_grad" not in optimizer.state[tensors[1]]


def test_gradient_laid_out_otherwise_than_the_parameter():
    weight = torch.randn(8, 4, 3, 3)
    plain, last = (
        nn.Parameter(weight.clone()),
        nn.Parameter(weight.clone(memory_format=torch.channels_last)),
    )
    sequence = gradients((8, 4, 3, 3), 5, seed=0)
    for rule in ("mars-adamw", "adamw"):
        run(MARS([plain], rule=rule), [plain], [sequence])
        optimizer = MARS([last], rule=rule)
        for gradient in sequence:
            last.grad = gradient.clone()
            optimizer.step()
        torch.testing.assert_close(plain, last, rtol=1e-6, atol=1e-7)


def test_bad_parameters_are_refused():
    with pytest.raises(ValueError, match="dense in memory"):
        MARS([torch.ones(4, 4)[:, ::2].requires_grad_()])
    with pytest.raises(ValueError, match="real floating-point"):
        MARS([torch.ones(2, dtype=torch.complex64).requires_grad_()])
    embedding = nn.Embedding(4, 2, sparse=True)
    optimizer = MARS(embedding.parameters())
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="sparse"):
        optimizer.step()


def test_a_copy_and_a_bad_group_and_no_rows():
    parameter = nn.Parameter(torch.ones(4, 4))
    optimizer = MARS(
        [
            {"params": []},
            {"params": [parameter], "rule": "mars-m"},
            {"params": [nn.Parameter(torch.ones(0, 4))], "rule": "muon"},
        ]
    )
    twin = copy.deepcopy(optimizer)
    for each in (optimizer, twin):
        (tensor,) = each.param_groups[1]["params"]
        tensor.grad = torch.eye(4)
        each.step()
    assert torch.equal(parameter, twin.param_groups[1]["params"][0])
    assert twin.param_groups[1]["params"][0] is not parameter
    with pytest.raises(ValueError, match="lr"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], "lr": -1.0})
    assert len(optimizer.param_groups) == 3


def test_huge_gradients_are_finite():
    for rule in ("adamw", "mars-adamw", "lion"):
        parameter = nn.Parameter(torch.ones(4))
        optimizer = MARS([parameter], rule=rule, lr=0.1, max_grad_norm=1.0)
        parameter.grad = torch.full((4,), 1e20)
        optimizer.step()
        assert optimizer.grad_norm.item() == pytest.approx(2e20) and (parameter < 1).all()


def test_bfloat16_matrices_decay():
    decayed = {}
    for weight_decay in (0.0, 0.1):
        parameter = nn.Parameter(torch.linspace(1, 2, 4096).reshape(64, 64).bfloat16())
        optimizer = MARS([parameter], rule="muon", lr=6e-2, weight_decay=weight_decay)
        for _ in range(20):
            parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
        decayed[weight_decay] = parameter.float().mean().item()
    assert decayed[0.1] < 0.97 * decayed[0.0]


def test_last_grad_wider_than_the_parameter_survives_loading():
    parameter = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = MARS([parameter], last_grad_dtype=torch.float32)
    optimizer.state[parameter]["last_grad"].fill_(0.35401)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert torch.equal(optimizer.state[parameter]["last_grad"], torch.full((3,), 0.35401))


def test_exact_mode_forgets_a_parameter_without_a_look_ahead_gradient():
    parameter = nn.Parameter(torch.ones(3))
    optimizer = MARS([parameter], exact=True)
    for ahead in (5.0, 7.0, None):
        parameter.grad = None if ahead is None else torch.full((3,), ahead)
        optimizer.look_ahead()
        parameter.grad = torch.ones(3)
        optimizer.step()
    assert not optimizer.state[parameter]["last_grad"].any()
