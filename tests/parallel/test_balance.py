"""Counts of experts' tokens, and the losses of routers; test_composition.py has layouts."""

import dataclasses

import pytest
import torch
from torch.nn import functional as F

from tests.support import gradients
from tests.support.full import FULL
from tests.support.ranks import run_ranks
from torchmars.config import ActivationCheckpointConfig, ParallelismConfig
from torchmars.models.moe import with_losses

LAYERS, EXPERTS, USED = 4, 8, 2
# Of the last step: large coefficients let a wrong one show in every gradient.
COUNTS = torch.randint(50, (LAYERS, EXPERTS), generator=torch.Generator().manual_seed(2))
LOSSES = {"balance_loss": 1.0, "router_z_loss": 0.1}
TOKENS = gradients.WINDOWS[:, 1:].numel()


def own_losses(logits, counts, balance_loss, router_z_loss):
    """The losses of one router, of all its tokens at once."""
    shares = counts.to(logits.dtype) / counts.sum()
    balance = (shares * logits.softmax(-1).mean(0)).sum() * len(counts)
    return balance_loss * balance + router_z_loss * logits.exp().sum(-1).log().square().mean()


def found_on(mode, compile):
    """The gradients and counts of one rank."""
    training = dataclasses.replace(gradients.training_on(1, compile), **LOSSES)
    activations = ActivationCheckpointConfig(mode)
    _, model, batch = gradients.model_on("moe", ParallelismConfig(), training, activations)
    for name, counts in zip(model.balance.layers, model.balance.counts, strict=True):
        counts.copy_(COUNTS[int(name)])
    model.backward(batch)
    model.balance.finish(torch.tensor(True))
    return gradients.gathered_gradients(model), model.balance.counts


def compiled_and_not(mode):
    """`found_on` with blocks that are traced and cut in two, not made into code, and without."""
    compile_block = torch.nn.Module.compile
    torch.nn.Module.compile = lambda block: compile_block(block, backend="aot_eager")
    return found_on(mode, True), found_on(mode, False)


@FULL
@pytest.mark.parametrize("mode", ["none", "full"])
def test_compiled_blocks_count_and_add_the_same(mode):
    [((found, counts), (plain, of_plain))] = run_ranks(compiled_and_not, 1, mode)
    assert torch.equal(counts, of_plain)
    for name, (_, gradient) in found.items():
        torch.testing.assert_close(gradient, plain[name][1], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("z_loss", [0.0, 0.3])
def test_a_routers_losses_have_the_gradient_of_float64(z_loss):
    generator = torch.Generator().manual_seed(3)
    exact = torch.randn(40, EXPERTS, dtype=torch.float64, generator=generator).mul(2)
    logits = exact.float().requires_grad_()
    exact = logits.detach().double().requires_grad_()
    upstream = torch.randn(40, EXPERTS, generator=generator)
    pressure = 0.7 * EXPERTS * COUNTS[0] / COUNTS[0].sum()
    scores = with_losses(logits.softmax(-1), logits, pressure, z_loss)
    assert torch.equal(scores, logits.softmax(-1))
    scores.backward(upstream / 40)
    expected = (exact.softmax(-1) * upstream).sum() / 40
    (expected + own_losses(exact, COUNTS[0], 0.7, z_loss)).backward()
    torch.testing.assert_close(logits.grad.double(), exact.grad, rtol=1e-5, atol=1e-8)


def test_probabilities_of_sigmoid_scores_sum_to_one():
    logits = torch.randn(40, EXPERTS, generator=torch.Generator().manual_seed(4)).requires_grad_()
    exact = logits.detach().double().requires_grad_()
    pressure = COUNTS[0] / COUNTS[0].sum()
    with_losses(logits.sigmoid(), logits, pressure, 0.0).backward(torch.zeros(40, EXPERTS))
    parts = F.normalize(exact.sigmoid(), p=1, dim=-1)
    (parts.mean(0) * pressure).sum().backward()
    torch.testing.assert_close(logits.grad.double(), exact.grad, rtol=1e-5, atol=1e-9)


RATE = 0.01


def steps_of_one_rank():
    """What `Balance` has after steps whose counts are given, one of them skipped."""
    training = dataclasses.replace(gradients.training_on(1), **LOSSES, balance_rate=RATE)
    nothing = ParallelismConfig(), training, ActivationCheckpointConfig()
    _, model, batch = gradients.model_on("moe", *nothing)
    balance, seen = model.balance, []
    balance.exact = True
    for layer in balance.layers.values():
        layer.router.register_buffer("bias", torch.zeros(EXPERTS))
    before_the_first = balance.figures()
    for applied in (True, False, True):
        model.backward(batch)
        balance.found.copy_(COUNTS + len(seen))
        balance.finish(torch.tensor(applied))
        biases = torch.stack([layer.router.bias for layer in balance.layers.values()])
        seen.append((balance.counts.clone(), balance.before.clone(), biases))
    assert balance.state().keys() == {
        f"balance.{n}.{name}" for n in range(LAYERS) for name in ("counts", "counts_before")
    }
    return before_the_first, seen


def test_a_skipped_step_changes_nothing_but_what_the_next_look_ahead_took():
    [(before_the_first, (first, skipped, third))] = run_ranks(steps_of_one_rank, 1)
    assert before_the_first == {}
    assert torch.equal(first[0], COUNTS) and not first[1].any()
    assert torch.equal(skipped[0], COUNTS) and torch.equal(skipped[1], COUNTS)
    assert torch.equal(third[0], COUNTS + 2) and torch.equal(third[1], COUNTS)
    moves = RATE * (COUNTS.double().mean(1, keepdim=True) - COUNTS).sign()
    moves -= moves.mean(1, keepdim=True)
    for steps, (_, _, biases) in zip((1, 1, 2), (first, skipped, third), strict=True):
        torch.testing.assert_close(biases.double(), steps * moves, rtol=1e-5, atol=1e-8)


def pressures_of(rank_steps=4):
    """The counts by which the losses of each pass are set in exact mode, a step skipped."""
    training = dataclasses.replace(gradients.training_on(1), **LOSSES)
    nothing = ParallelismConfig(), training, ActivationCheckpointConfig()
    _, model, batch = gradients.model_on("moe", *nothing)
    balance, used = model.balance, []
    balance.exact, set_losses = True, balance._set_losses
    balance._set_losses = lambda counts, parts: (
        used.append(counts.clone()),
        set_losses(counts, parts),
    )
    for step in range(rank_steps):
        model.backward(batch, ahead=True)
        model.backward(batch)
        balance.found.copy_(COUNTS + step)
        balance.finish(torch.tensor(step != 1))
    return used


def test_both_gradients_of_a_batch_have_the_same_shares():
    [used] = run_ranks(pressures_of, 1)
    ahead, own = used[::2], used[1::2]
    assert all(map(torch.equal, ahead[:-1], own[1:]))
    assert [each[0, 0].item() - COUNTS[0, 0].item() for each in ahead[1:]] == [0, 0, 2]
    assert not ahead[0].any() and not own[0].any()
