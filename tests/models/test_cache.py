"""Logits with a cache against those of a model that sees all tokens anew."""

import copy
import dataclasses

import pytest
import torch

from tests.exchange.test_configs import MODELS
from tests.support.their_models import randomised
from torchmars.core.errors import UserError
from torchmars.models.attention import CausalAttention, here
from torchmars.models.cache import Cache


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_without_a_cache(name):
    model = copy.deepcopy(randomised(MODELS[name], 0.1))
    plain = type(model)(dataclasses.replace(model.args)).eval()
    plain.load_state_dict(model.state_dict())
    contexts = [[5, 9, 2, 7, 1, 1, 8], [3], [4, 4, 6]]
    cache = Cache(model, 24)
    logits = cache.start(contexts)
    for token in (11, 12, 13):
        for context, found in zip(contexts, logits):
            with torch.no_grad():
                expected = plain.head(plain(torch.tensor([context])))[0, -1]
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        for context in contexts:
            context.append(token)
        logits = cache.go_on([token] * 3)


@pytest.mark.parametrize("name", ["llama", "deepseek", "deepseek without latents of queries"])
def test_a_cache_holds_what_attention_keeps_of_each_token(name):
    """Of latent attention a latent and the part of a key that is rotated, and no more."""
    model = copy.deepcopy(randomised(MODELS[name], 0.1))
    cache, args, places = Cache(model, 24), model.args, set()
    cache.start([[5, 9, 2], [3]])
    for block in model.blocks.values():
        kept = block.attn.attend.reach
        places |= {each.untyped_storage() for each in (kept.keys, kept.values)}
    width = 2 * args.n_kv_head * args.head_width
    if "deepseek" in name:
        width = args.kv_lora_rank + args.qk_rope_head_dim
    assert model.kept_width == width
    assert sum(each.nbytes() for each in places) == args.n_layer * 2 * 24 * width * 4


def test_fifty_tokens_are_those_without_a_cache():
    """The likeliest of each, after prompts of two lengths: latents are mixed as they are."""
    model = copy.deepcopy(randomised(MODELS["deepseek"], 0.1))
    plain = type(model)(dataclasses.replace(model.args)).eval()
    plain.load_state_dict(model.state_dict())
    contexts = [[5, 9, 2, 7, 1], [3, 8]]
    cache = Cache(model, 60)
    logits = cache.start(contexts)
    for _ in range(50):
        tokens = logits.argmax(dim=-1).tolist()
        for context, token in zip(contexts, tokens):
            with torch.no_grad():
                expected = plain.head(plain(torch.tensor([context])))[0, -1].argmax()
            assert token == expected
            context.append(token)
        logits = cache.go_on(tokens)


class Own(CausalAttention):
    def forward(self, q, k, v, sight=None, dropout=0.0):
        return v


@pytest.mark.parametrize("attend", [Own(), torch.nn.Identity()])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_an_attention_that_reaches_nothing_is_refused(name, attend):
    model = copy.deepcopy(MODELS[name])
    model.blocks["0"].attn.attend = attend
    with pytest.raises(UserError, match="block 0 of .* has an attention of its own"):
        Cache(model, 8)
    with pytest.raises(UserError, match="override `mix` alone"):
        model.let_reach(lambda: here)


def test_a_model_on_another_device_gets_all_there():
    """As on a GPU. Here it is the device without memory."""
    with torch.device("meta"):
        model = type(MODELS["llama"])(MODELS["llama"].args).eval()
    got, transform = [], model.transform
    model.transform = lambda *args: got.extend([*args[:2], args[2].mask]) or transform(*args)
    cache = Cache(model, 24)
    for logits in (cache.start([[5, 9, 2], [3]]), cache.go_on([1, 2])):
        assert logits.is_meta and logits.shape[0] == 2
    assert len(got) == 2 * 3 and all(each.is_meta for each in got)
