"""The loss in chunks against `torch.nn.functional.cross_entropy` of whole logits."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch._inductor.utils import run_and_get_code
from torch._subclasses import FakeTensorMode

from tests.support import gradients
from tests.support.memory import MemoryCounter
from tests.support.ranks import run_ranks
from torchmars.config import ActivationCheckpointConfig, ParallelismConfig
from torchmars.models.initialize import init_weights
from torchmars.parallel import loss as losses
from torchmars.parallel.loss import mean_loss, token_losses, token_scores

TOKENS, WIDTH, ROWS = 23, 16, 50
Z_LOSS = 0.3  # large, so that its gradient tells


def drawn(dtype=torch.float32):
    """Hidden states, a head's weight, and targets."""
    generator = torch.Generator().manual_seed(0)
    hidden = 3 * torch.randn(TOKENS, WIDTH, generator=generator)
    weight = torch.randn(ROWS, WIDTH, generator=generator)
    targets = torch.randint(ROWS, (TOKENS,), generator=generator)
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), targets


def whole(hidden, weight, targets, z_loss=0.0):
    """The mean loss of whole logits in float64; its gradients, those of the z-loss among them."""
    hidden, weight = (each.detach().double().requires_grad_() for each in (hidden, weight))
    logits = hidden @ weight.T
    loss = F.cross_entropy(logits, targets)
    (loss + z_loss * logits.logsumexp(-1).square().mean()).backward()
    return loss.detach(), hidden.grad, weight.grad


@pytest.fixture
def as_written(monkeypatch):
    """Let what is to be compiled run as it is written: that gives the same, to rounding."""
    monkeypatch.setattr(losses, "_compiled", lambda kernel: kernel)


def relative_error(found, expected):
    return ((found.double() - expected).norm() / expected.norm()).item()


def check_loss_and_gradients(chunk, z_loss, compile):
    hidden, weight, targets = drawn()
    # Some targets are so unlikely that their probability in float32 is 0.
    with torch.no_grad():
        hidden[:3] *= 40
    expected, of_hidden, of_weight = whole(hidden, weight, targets, z_loss)
    loss = mean_loss(hidden, weight, targets, chunk, z_loss, compile)
    (3 * loss).backward()
    assert loss.dtype == torch.float32 and loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert relative_error(hidden.grad, 3 * of_hidden) < 1e-6
    assert relative_error(weight.grad, 3 * of_weight) < 1e-6


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("z_loss", [0.0, Z_LOSS])
@pytest.mark.parametrize("chunk", [1, 5, TOKENS, 100])
def test_loss_and_gradients_are_those_of_whole_logits(chunk, z_loss, compile, as_written):
    check_loss_and_gradients(chunk, z_loss, compile)


def test_compiled_code_reads_a_chunk_twice_and_writes_it_once():
    """It is one kernel for the sums and one for the gradients, whatever the number of tokens."""
    rows = 64  # in whole vectors, on any CPU

    def compiled():
        for tokens in (5, 3, 23):
            hidden, weight, targets = (
                torch.rand(tokens, 8),
                torch.rand(rows, 8),
                torch.arange(tokens),
            )
            losses = [
                mean_loss(hidden.requires_grad_(), weight, targets, tokens, Z_LOSS, compile)
                for compile in (True, False)
            ]
            torch.testing.assert_close(*losses, rtol=1e-6, atol=0)
            gradients = [torch.autograd.grad(loss, hidden)[0] for loss in losses]
            torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-7)

    _, codes = run_and_get_code(compiled)
    sums, gradient = (
        [code.count(word) for word in ("(int64_t x0", "loadu(", ".store(")] for code in codes
    )
    # The largest logit of a row is found, then the sum, while the row is in the cache.
    assert sums == [1, 2, 0]
    assert gradient == [1, 1, 1]


def test_chunks_lose_nothing_in_bfloat16():
    """The sum over many chunks is as near to exact as one product of all tokens."""
    errors = []
    for chunk in (1, TOKENS):
        hidden, weight, targets = drawn(torch.bfloat16)
        _, of_hidden, of_weight = whole(hidden, weight, targets)
        mean_loss(hidden, weight, targets, chunk).backward()
        assert hidden.grad.dtype == weight.grad.dtype == torch.bfloat16
        errors.append(
            [relative_error(hidden.grad, of_hidden), relative_error(weight.grad, of_weight)]
        )
    for chunked, at_once in zip(*errors):
        assert chunked < 1.2 * at_once < 0.01


def test_losses_and_scores_of_each_token():
    hidden, weight, targets = drawn()
    logits = hidden.double() @ weight.double().T
    targets[::2] = logits.argmax(-1)[::2]
    shape = (TOKENS, 1)
    losses = token_losses(hidden.view(*shape, WIDTH), weight, targets.view(shape), 5)
    scores = token_scores(hidden.view(*shape, WIDTH), weight, targets.view(shape), 5)
    expected = F.cross_entropy(logits, targets, reduction="none").detach().float().view(shape)
    torch.testing.assert_close(losses, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(scores[..., 0], -expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(scores[:, 0, 1], (logits.argmax(-1) == targets).float())
    assert not losses.requires_grad and not scores.requires_grad


def peak(tokens, chunk, compile=False, rows=4000, width=8):
    """Bytes that the loss takes at its worst moment, beside hidden states and their gradient."""
    with FakeTensorMode():
        hidden = torch.empty(tokens, width, requires_grad=True)
        weight = torch.empty(rows, width, requires_grad=True)
        targets = torch.empty(tokens, dtype=torch.int64)
        memory = MemoryCounter()
        memory.know([hidden, weight, targets])
        with memory:
            mean_loss(hidden, weight, targets, chunk, compile=compile).backward()
    return memory.peak - 2 * hidden.nbytes


def test_memory_does_not_grow_with_the_tokens():
    logits = 128 * 4000 * 4
    assert 2 * logits < peak(128, chunk=128) < 3.2 * logits
    assert peak(16 * 128, chunk=128) < 1.05 * peak(128, chunk=128)
    assert logits < peak(16 * 128, chunk=128, compile=True) < 1.2 * logits


def gradients_in_chunks():
    """What `gradients_on` finds on this rank, of compiled chunks of few tokens."""
    losses._compiled = lambda kernel: kernel
    training = dataclasses.replace(gradients.training_on(2), z_loss=Z_LOSS)
    case = "llama", ParallelismConfig(tp=2), training, ActivationCheckpointConfig()
    return gradients.gradients_on(*case, chunk=5, compile_loss=True)


def test_gradients_of_compiled_chunks_of_a_head_cut_by_rows():
    model = gradients.MODELS["llama"]()
    init_weights(model, seed=0)
    logits = model.head(model(gradients.WINDOWS[:, :-1])).flatten(0, 1)
    loss = F.cross_entropy(logits, gradients.WINDOWS[:, 1:].flatten())
    (loss + Z_LOSS * logits.logsumexp(-1).square().mean()).backward()
    plain = {name: (each.detach(), each.grad) for name, each in model.named_parameters()}
    gradients.compare(run_ranks(gradients_in_chunks, 2), "TP 2", (loss.item(), plain))
