"""GPT-2 against transformers' implementation, and its published sizes."""

import pytest
import torch

from torchmars.config import ModelConfig
from torchmars.config.gpt2 import GPT2Args
from torchmars.models import build_meta_model
from torchmars.models.gpt2 import GPT2
from torchmars.models.initialize import init_weights

ARGS = GPT2Args(n_layer=3, n_head=4, n_embd=32, vocab_size=64, seq_len=24)
NAMES = {
    "attn_norm": "ln_1",
    "mlp_norm": "ln_2",
    "attn.qkv": "attn.c_attn",
    "attn.proj": "attn.c_proj",
    "mlp.up": "mlp.c_fc",
    "mlp.proj": "mlp.c_proj",
}


def reference(model, **options):
    """The same model by transformers, biases zero."""
    transformers = pytest.importorskip("transformers")
    args = model.args
    other = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            n_layer=args.n_layer,
            n_head=args.n_head,
            n_embd=args.n_embd,
            vocab_size=args.vocab_size,
            n_positions=args.seq_len,
            activation_function="gelu",
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            **options,
        )
    ).eval()
    weights = {
        "transformer.wte.weight": model.tok_embed.weight,
        "transformer.wpe.weight": model.pos_embed.weight,
        "transformer.ln_f.weight": model.norm.weight,
    }
    for layer, block in model.blocks.items():
        for ours, theirs in NAMES.items():
            weight = block.get_submodule(ours).weight
            weights[f"transformer.h.{layer}.{theirs}.weight"] = (
                weight if weight.ndim == 1 else weight.T
            )  # Conv1D
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            parameter.copy_(weights[name]) if name in weights else parameter.zero_()
    return other


@pytest.mark.parametrize("scaled", [False, True])
def test_logits_and_gradients_equal_transformers(scaled):
    model = GPT2(GPT2Args(**vars(ARGS) | {"scale_attn_by_inverse_layer_idx": scaled}))
    for parameter in model.parameters():
        torch.nn.init.normal_(
            parameter, std=0.3, generator=torch.Generator().manual_seed(parameter.numel())
        )
    other = reference(model, scale_attn_by_inverse_layer_idx=scaled)
    tokens = torch.randint(64, (2, 24), generator=torch.Generator().manual_seed(0))
    ours, theirs = model.head(model(tokens)), other(tokens).logits
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    ours.square().mean().backward()
    theirs.square().mean().backward()
    torch.testing.assert_close(
        model.tok_embed.weight.grad, other.transformer.wte.weight.grad, rtol=1e-3, atol=1e-4
    )
    torch.testing.assert_close(
        model.blocks["0"].attn.qkv.weight.grad.T,
        other.transformer.h[0].attn.c_attn.weight.grad,
        rtol=1e-3,
        atol=1e-4,
    )


@pytest.mark.parametrize(
    "size,parameters", [("small", 124.4e6), ("medium", 354e6), ("large", 773e6), ("xl", 1557e6)]
)
def test_published_sizes(size, parameters):
    model = build_meta_model(ModelConfig(size=size), 50257, 1024)
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
