"""What a layer may count, and add to a gradient, on every layout: as mixtures of experts will."""

import pytest
import torch

from tests.parallel import test_gradients as gradients
from tests.support.full import full_but
from tests.support.layouts import LAYOUTS
from tests.support.ranks import run_ranks
from torchmars.config import ActivationCheckpointConfig, ParallelismConfig
from torchmars.models.initialize import init_weights
from torchmars.models.model import is_counted_pass

SCALE, TOKENS = 0.1, gradients.WINDOWS[:, 1:].numel()
CASES = [
    ("FSDP 2", "full"),
    ("TP 2", "selective"),
    ("CP 2", "none"),
    ("PP 2 Interleaved1F1B", "full"),
    ("PP 2 InterleavedZeroBubble", "none"),  # makes the backward pass of inputs and weights apart
]


class AddGradient(torch.autograd.Function):
    """Adds a number to the gradient of each element."""

    @staticmethod
    def forward(ctx, x, number):
        ctx.number = number
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient + ctx.number, None


def with_layers(name, number, counts):
    """A model each of whose MLPs counts its tokens, and adds `number` to its output's gradient."""
    model = gradients.MODELS[name]()

    def hook(module, args, output):
        if is_counted_pass():
            counts.append(output.shape[:-1].numel())
        return AddGradient.apply(output, number)

    for block in model.blocks.values():
        block.mlp.register_forward_hook(hook)
    return model


def found_on(name, settings, mode):
    """What this rank counts, and its gradients."""
    parallelism, counts = ParallelismConfig(**settings), []
    # FSDP takes the mean over its ranks; those of tp and of a pipeline have parts of one sum.
    averaged = 2 // (parallelism.tp * parallelism.pp)
    own = f"{name} with layers"
    gradients.MODELS[own] = lambda: with_layers(name, SCALE * averaged / TOKENS, counts)
    training = gradients.training_on(2)
    result = gradients.gradients_on(own, parallelism, training, ActivationCheckpointConfig(mode))
    return sum(counts), result


def all_found(name):
    return [found_on(name, LAYOUTS[layout][1], mode) for layout, mode in CASES]


@pytest.mark.parametrize("name", full_but(["gpt2"], ["gpt2", "llama"]))
def test_each_token_is_counted_once_and_the_gradient_added_everywhere(name):
    plain = with_layers(name, SCALE / TOKENS, counts := [])
    init_weights(plain, seed=0)
    logits = plain.head(plain(gradients.WINDOWS[:, :-1]))
    loss = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), gradients.WINDOWS[:, 1:].flatten()
    )
    loss.backward()
    expected = {key: (each.detach(), each.grad) for key, each in plain.named_parameters()}
    with torch.no_grad():
        plain(gradients.WINDOWS[:, :-1])
    assert sum(counts) == TOKENS * len(plain.blocks)
    for case, ranks in zip(CASES, zip(*run_ranks(all_found, 2, name))):
        assert sum(count for count, _ in ranks) == sum(counts), case
        gradients.compare([each for _, each in ranks], case, (loss.item(), expected))
