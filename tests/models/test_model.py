"""What every family of models promises."""

import dataclasses

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tests.models import test_gpt2, test_latent, test_llama, test_moe
from torchmars.config.model import MODELS
from torchmars.models import family as family_of
from torchmars.models.attention import CausalAttention
from torchmars.models.deepseek import Deepseek
from torchmars.models.gpt2 import GPT2
from torchmars.models.initialize import init_weights
from torchmars.models.llama import Llama

VARIANTS = test_llama.VARIANTS | test_moe.VARIANTS
SHAPES = [(GPT2, test_gpt2.ARGS)] + [
    (Llama, dataclasses.replace(test_llama.ARGS, **changes)) for changes in VARIANTS.values()
]
# Values as wide as keys: math, which is counted here, takes narrower ones as wide.
SHAPES += [
    (Deepseek, dataclasses.replace(test_latent.ARGS, v_head_dim=24, **changes))
    for changes in test_latent.VARIANTS.values()
]
NAMES = ["gpt2", *VARIANTS, *test_latent.VARIANTS]

every_shape = pytest.mark.parametrize("family,args", SHAPES, ids=NAMES)


def test_every_family_is_here():
    families = {family_of(name) for name in MODELS}  # those of other tests may be among them
    ours = {family for family in families if family.__module__.startswith("torchmars.")}
    assert {family for family, _ in SHAPES} == ours


@every_shape
def test_flops_per_token_counts_what_runs(family, args):
    if getattr(args, "window", None):
        pytest.skip("the mask of a window has all keys: see test_window")
    model = family(args)
    tokens = torch.randint(64, (2, 24))
    with (
        sdpa_kernel(SDPBackend.MATH),
        FlopCounterMode(display=False) as counter,
    ):  # it counts no fused attention on CPU
        model.head(model(tokens)).sum().backward()
    assert model.flops_per_token() * tokens.numel() == counter.get_total_flops()


@every_shape
def test_tensor_parallelism_knows_every_matrix(family, args):
    parameters = family(args).named_parameters()
    named = {name.removesuffix(".weight") for name, value in parameters if value.ndim == 2}
    named -= {name for name in named if name.endswith("router")}  # whole on each rank
    for name in named:
        assert sum(name.endswith(end) for end in family.cuts) == 1, name
    unused = {end for end in family.cuts if not any(name.endswith(end) for name in named)}
    unused -= {f"mlp{part}.{layer}" for part in ("", ".shared") for layer in ("gate", "up", "proj")}
    unused -= {"attn.q", "attn.q_a", "attn.q_b"}  # with or without latents of queries
    assert unused <= {"output"}  # of a tied head; those before, of other blocks than there are


@every_shape
def test_attention_and_mlp_of_each_block_map_hidden_states_to_hidden_states(family, args):
    model, seen = family(args), []
    for block in model.blocks.values():
        for branch in (block.attn, block.mlp):
            branch.register_forward_hook(lambda _, args, y: seen.append(y.shape == args[0].shape))
    model(torch.randint(64, (2, 24)))
    assert seen == [True] * 2 * len(model.blocks)


def itself(q, k, v, mix):
    """Lets each token attend to itself only."""
    tokens = zip(*(part.split(1, dim=2) for part in (q, k, v)))
    return torch.cat([mix(*token) for token in tokens], dim=2)


@every_shape
def test_tokens_see_each_other_through_attend_only(family, args):
    model = family(args).eval()
    init_weights(model, seed=0)
    tokens = torch.randint(64, (1, 24))
    other = torch.cat([(tokens[:, :12] + 1) % 64, tokens[:, 12:]], dim=1)
    assert not torch.equal(model(tokens)[:, 12:], model(other)[:, 12:])
    for block in model.blocks.values():
        assert isinstance(block.attn.attend, CausalAttention)
        block.attn.attend.reach = itself
    # A product's last bits depend on how many rows it has: on what other tokens choose.
    bound = 1e-5 if getattr(args, "n_expert", 0) else 0
    torch.testing.assert_close(model(tokens)[:, 12:], model(other)[:, 12:], rtol=bound, atol=bound)
