"""The largest logit of each head, against all logits at once."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode  # private, torch 2.11 to 2.15
from torch.utils._pytree import tree_leaves

from torchmars.models import document_kernel, logits
from torchmars.models.attention import CausalAttention, Sight
from torchmars.models.documents import document_numbers, document_starts

NEAR = {"rtol": 1e-6, "atol": 1e-6}
GENERATOR = torch.Generator().manual_seed(0)


def expected(q, k, scale, numbers=None, window=None):
    """Of all logits in float64, those that a mask of all of them lets through."""
    queries, keys = q.shape[2], k.shape[2]
    k = k.double().repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    every = q.double() @ k.mT * scale
    distance = torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)
    seen = (distance >= 0) & (distance < (window or keys))
    if numbers is not None:
        seen = seen & (numbers[:, None, -queries:, None] == numbers[:, None, None, :])
    return every.masked_fill(~seen, -torch.inf).amax((0, 2, 3))


def random(*sizes):
    return torch.randn(sizes, generator=GENERATOR)


@pytest.mark.parametrize("elements", [1, 1000, logits.ELEMENTS])
def test_it_is_that_of_all_logits_at_once(elements, monkeypatch):
    monkeypatch.setattr(logits, "ELEMENTS", elements)
    monkeypatch.setattr(logits, "QUERIES", 7)
    tokens = torch.randint(6, (3, 40), generator=GENERATOR)
    numbers = document_numbers(document_starts(tokens, 0), 40)
    since = document_starts(tokens, 0).gather(1, numbers)
    for queries, groups in ((40, 4), (40, 2), (13, 1), (1, 4)):
        q, k = random(3, 4, queries, 8), random(3, groups, 40, 8)
        for window in (None, 1, 5, 40, 100):
            found = logits.largest_logits(q, k, 0.3, window=window or 0)
            torch.testing.assert_close(found.double(), expected(q, k, 0.3, None, window), **NEAR)
            apart = logits.largest_logits(q, k, 0.3, since[:, -queries:], window or 0)
            wanted = expected(q, k, 0.3, numbers, window)
            torch.testing.assert_close(apart.double(), wanted, **NEAR)
    assert not torch.equal(expected(q, k, 0.3), wanted)


def test_attention_notes_it_beside_what_it_noted_before(monkeypatch):
    """With masks and the starts of documents, of the last tokens, with its own scale."""
    monkeypatch.setattr(document_kernel, "mix_documents", lambda q, *_: q)  # no GPU is here
    tokens = torch.randint(6, (2, 24), generator=GENERATOR)
    starts = document_starts(tokens, 0)
    numbers = document_numbers(starts, 24)
    sights = [Sight.of_documents(starts, 24, torch.empty(0), 0.0), Sight(starts=starts, length=24)]
    for scale, sight in ((None, None), (0.5, sights[0]), (0.5, sights[1])):
        attend, q, k = CausalAttention(scale), random(2, 4, 12, 16), random(2, 2, 18, 16)
        attend.watched = torch.tensor([-torch.inf, 1e3, -torch.inf, -1e3])
        attend.mix(q, k, k, sight, 0.0)
        of_documents = None if sight is None else numbers[:, :18]
        wanted = expected(q, k, scale or 16**-0.5, of_documents)
        wanted[1] = 1e3
        torch.testing.assert_close(attend.watched.double(), wanted, **NEAR)


class Sizes(TorchDispatchMode):
    """Notes the elements of the largest tensor that any operation makes."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **kwargs or {})
        made = [each.numel() for each in tree_leaves(result) if isinstance(each, torch.Tensor)]
        self.largest = max([self.largest, *made])
        return result


def test_it_needs_no_memory_for_all_logits():
    q, k = random(1, 2, 2048, 4), random(1, 1, 2048, 4)
    with Sizes() as sizes:
        logits.largest_op._init_fn(q, k, 1.0, None, 0)  # its code: a mode sees no further
    assert 0 < sizes.largest <= 2 * logits.QUERIES * 2048
