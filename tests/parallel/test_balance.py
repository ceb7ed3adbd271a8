"""Counts of experts' tokens, and the losses of routers: the same on every layout."""

import dataclasses

import pytest
import torch
from torch.nn import functional as F

from tests.support import gradients
from tests.support.full import FULL
from tests.support.layouts import LAYOUTS
from tests.support.ranks import run_ranks
from torchmars.config import ActivationCheckpointConfig, ParallelismConfig
from torchmars.models.initialize import init_weights
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


def plain_result():
    """Loss, weights, gradients and counts of one plain model, whose routers' losses are added."""
    model, added, counts = gradients.MODELS["moe"](), [], []
    init_weights(model, seed=0)
    for block, last in zip(model.blocks.values(), COUNTS, strict=True):

        def hook(router, args, output, last=last):
            added.append(own_losses(F.linear(args[0], router.weight), last, **LOSSES))
            counts.append(output[1].flatten().bincount(minlength=EXPERTS))

        block.mlp.router.register_forward_hook(hook)
    logits, targets = model.head(model(gradients.WINDOWS[:, :-1])), gradients.WINDOWS[:, 1:]
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    (loss + sum(added)).backward()
    found = {name: (value.detach(), value.grad) for name, value in model.named_parameters()}
    return loss.item(), found, torch.stack(counts)


def found_on(layout, mode, ahead=False, compile=False):
    """What a rank has after a step and a validation: loss, gradients, and counts by block."""
    ranks, parallelism = LAYOUTS[layout][0], ParallelismConfig(**LAYOUTS[layout][1])
    training = dataclasses.replace(gradients.training_on(ranks, compile), **LOSSES)
    activations = ActivationCheckpointConfig(mode)
    layout, model, batch = gradients.model_on("moe", parallelism, training, activations)
    balance = model.balance
    for name, counts in zip(balance.layers, balance.counts, strict=True):
        counts.copy_(COUNTS[int(name)])
    loss = layout.mean_loss(model.backward(batch, ahead=ahead))
    found = gradients.gathered_gradients(model)
    model.losses(gradients.WINDOWS)
    if not ahead:
        balance.finish(torch.tensor(True))
    counts = {name.split(".")[1]: each.clone() for name, each in balance.state().items()}
    return loss, found, counts, balance.figures()


def all_found(cases):
    return [found_on(*case) for case in cases]


CASES = [
    ("FSDP 2", "full"),
    ("TP 2", "selective"),
    ("CP 2", "none"),
    ("PP 2 Interleaved1F1B", "full"),
    ("PP 2 GPipe", "none"),
]
MORE = [
    ("TP 2 x CP 2", "full"),
    ("HSDP 2x2", "selective"),
    ("PP 2 x TP 2", "none"),
    ("PP 2 x FSDP 2", "none"),
]


@pytest.mark.parametrize(
    "ranks,cases", [(2, CASES), pytest.param(4, MORE, marks=FULL)], ids=["", "more"]
)
def test_gradients_and_counts_are_those_of_one_plain_model(ranks, cases):
    *plain, counts = plain_result()
    assert (counts.sum(1) == USED * TOKENS).all()
    figures = expected_figures(counts)
    for case, results in zip(cases, zip(*run_ranks(all_found, ranks, cases)), strict=True):
        gradients.compare([(loss, found) for loss, found, _, _ in results], case, plain)
        ours = {name: each for *_, of_rank, _ in results for name, each in of_rank.items()}
        assert torch.equal(torch.stack([ours[str(n)] for n in range(LAYERS)]), counts), case
        for *_, of_rank, figures_there in results:
            assert all(torch.equal(each, ours[name]) for name, each in of_rank.items()), case
            assert figures_there == pytest.approx(figures), case


def expected_figures(counts):
    shares = counts.double() / counts.sum(1, keepdim=True)
    entropies = torch.distributions.Categorical(shares).entropy() / torch.tensor(EXPERTS).log()
    return {
        "experts/busiest": (shares.max() * EXPERTS).item(),
        "experts/entropy": entropies.mean().item(),
        "experts/without_tokens": (counts == 0).sum().item(),
    }


def compiled_found_on(*case):
    """As `found_on`, with blocks that are traced and cut in two, but not made into code."""
    compile_block = torch.nn.Module.compile
    torch.nn.Module.compile = lambda block: compile_block(block, backend="aot_eager")
    return found_on(*case, False, True)


@FULL
@pytest.mark.parametrize("mode", ["none", "full"])
def test_compiled_blocks_count_and_add_the_same(mode):
    *plain, counts = plain_result()
    [(loss, found, ours, _)] = run_ranks(compiled_found_on, 1, "1 rank", mode)
    gradients.compare([(loss, found)], mode, plain)
    assert torch.equal(torch.stack(list(ours.values())), counts)


def test_a_look_ahead_is_not_counted_and_has_the_losses():
    *plain, _ = plain_result()
    [(loss, found, ours, _)] = run_ranks(found_on, 1, "1 rank", "none", True)
    gradients.compare([(loss, found)], "look-ahead", plain)
    assert torch.equal(torch.stack(list(ours.values())), COUNTS)


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
