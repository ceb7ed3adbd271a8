"""Windows of attention: each token sees itself and the tokens before it, up to a number."""

import dataclasses
import random

import pytest
import torch
import torch.nn.functional as F

from tests.models.test_llama import ARGS, model_of
from torchmars.core.errors import UserError
from torchmars.models.attention import CausalAttention, Sight
from torchmars.models.documents import document_starts
from torchmars.models.llama import Llama


def seen_by_definition(queries, keys, window, since):
    """Who sees whom: [batch, 1, queries, keys], token by token."""
    seen = torch.zeros(len(since), 1, queries, keys, dtype=torch.bool)
    for row, first in enumerate(since):
        for query in range(queries):
            place = keys - queries + query
            for key in range(keys):
                seen[row, 0, query, key] = max(first[place], place - window + 1) <= key <= place
    return seen


def heads(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, requires_grad=True)


@pytest.mark.parametrize("queries,keys", [(150, 150), (1, 90), (70, 140), (3, 80)])
@pytest.mark.parametrize("window", [1, 2, 63, 64, 65, 79])
def test_a_window_is_what_its_definition_says(queries, keys, window):
    q = heads(2, 4, queries, 8)
    k, v = heads(2, 2, keys, 8, seed=1), heads(2, 2, keys, 8, seed=2)
    draw = random.Random(window)
    starts = [sorted({0, *(draw.randrange(keys) for _ in range(3))}) for _ in range(2)]
    since = torch.tensor([[max(s for s in row if s <= at) for at in range(keys)] for row in starts])
    mixed = CausalAttention()(q, k, v, Sight(since=since, window=window))
    mask = seen_by_definition(queries, keys, window, since.tolist())
    expected = F.scaled_dot_product_attention(
        *(each.double() for each in (q, k, v)), mask, enable_gqa=True
    )
    torch.testing.assert_close(mixed.double(), expected, rtol=1e-5, atol=1e-6)
    weights = torch.randn(expected.shape, dtype=torch.float64)
    ours = torch.autograd.grad((mixed * weights).sum(), (q, k, v))
    theirs = torch.autograd.grad((expected * weights).sum(), (q, k, v))
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", [24, 25, 1000])
def test_a_window_of_all_tokens_is_none_to_the_last_bit(window):
    tokens = torch.randint(64, (2, 24), generator=torch.Generator().manual_seed(0))
    plain = model_of(ARGS)
    narrow = model_of(dataclasses.replace(ARGS, window=window, window_blocks="sf"))
    starts = document_starts(tokens, 5)
    assert torch.equal(plain(tokens), narrow(tokens))
    assert torch.equal(plain(tokens, None, starts), narrow(tokens, None, starts))


def test_documents_with_a_window_are_each_computed_as_if_alone():
    args = dataclasses.replace(ARGS, window=5, window_blocks="sf", rope_blocks="rn")
    model = model_of(args)
    tokens = torch.randint(6, 64, (2, 24), generator=torch.Generator().manual_seed(0))
    tokens[0, 7] = tokens[0, 9] = tokens[1, 15] = 5
    hidden = model(tokens, None, document_starts(tokens, 5))
    for row, ends in enumerate([[0, 7, 9, 24], [0, 15, 24]]):
        for first, last in zip(ends, ends[1:]):
            alone = model(tokens[row : row + 1, first:last])[0]
            torch.testing.assert_close(hidden[row, first:last], alone, rtol=1e-5, atol=1e-5)


def test_flops_count_the_tokens_of_a_window():
    full = Llama(ARGS)
    narrow = Llama(dataclasses.replace(ARGS, window=5, window_blocks="sf"))
    windows = (ARGS.n_layer + 1) // 2
    fewer = 12 * ARGS.n_head * ARGS.head_width * (ARGS.seq_len - 5) * windows
    assert full.flops_per_token() - narrow.flops_per_token() == fewer


@pytest.mark.parametrize(
    "changes,message",
    [
        (
            {"window": 5, "window_blocks": "sx"},
            "model.window_blocks = 'sx': write a letter for each block",
        ),
        ({"window_blocks": ""}, "model.window_blocks = ''"),
        (
            {"rope_blocks": "R"},
            "model.rope_blocks = 'R': write a letter for each block, r, u, n",
        ),
        ({"window_blocks": "sf"}, "has no meaning without model.window"),
        ({"rope_attention_factor": 2.0}, 'has no meaning without model.rope_scaling = "yarn"'),
        ({"rope_scaling": "yarn"}, "needs model.rope_original_len"),
    ],
)
def test_what_cannot_be_built_is_one_line(changes, message):
    with pytest.raises(UserError, match=message):
        dataclasses.replace(ARGS, **changes).check()
