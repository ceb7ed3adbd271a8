"""GPT-2's published sizes and initial weights. tests/exchange has its logits and gradients."""

import pytest

from torchmars.config import model_config
from torchmars.config.gpt2 import GPT2Args
from torchmars.models import build_meta_model
from torchmars.models.gpt2 import GPT2
from torchmars.models.initialize import init_weights

ARGS = GPT2Args(n_layer=3, n_head=4, n_embd=32, vocab_size=64, seq_len=24)


@pytest.mark.parametrize(
    "size,parameters", [("small", 124.4e6), ("medium", 354e6), ("large", 773e6), ("xl", 1557e6)]
)
def test_published_sizes(size, parameters):
    model = build_meta_model(model_config(size=size), 50257, 1024)
    assert model.vocab_rows == 50304
    assert sum(parameter.numel() for parameter in model.parameters()) == pytest.approx(
        parameters, rel=2e-3
    )


def test_initial_weights():
    model = GPT2(ARGS)
    init_weights(model, seed=5)
    weights = dict(model.named_parameters())
    assert (weights["norm.weight"] == 1).all()
    assert weights["tok_embed.weight"].std().item() == pytest.approx(0.02, rel=0.1)
    assert weights["blocks.0.mlp.proj.weight"].std().item() == pytest.approx(0.02 / 6**0.5, rel=0.1)
