"""Attention of ranks that share sequences: the values of one rank, by the kernel of each chunk."""

import torch
import torch.distributed as dist

from tests.models.test_attention import CAUSAL, GROUPS, Calls
from tests.models.test_documents import END
from tests.support.ranks import run_ranks
from torchmars.models.attention import CausalAttention, Sight
from torchmars.models.documents import document_starts
from torchmars.parallel.context import Exchanged, Gathered, SequencePart


def mixed_on_ranks():
    """By way and sight: what this rank mixes, its part of what one rank does, and the calls."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, heads, 8, width, generator=generator)
        for heads, width in ((4, 16), (2, 16), (2, 12))
    )
    starts = document_starts(torch.tensor([[END, 1, 2, END, 4, 5, 6, 7]] * 2), END)
    part = SequencePart(dist.get_rank(), 2)
    own = [part.of(each.mT).mT for each in (q, k, v)]
    found = {}
    for way in (Gathered, Exchanged):
        for name, sight in (("all", None), ("apart", Sight.of_documents(starts, 8, q, 0.0))):
            plain, shared = CausalAttention(scale=0.3), CausalAttention(scale=0.3)
            shared.reach = way(dist.group.WORLD)
            with Calls() as calls:
                mixed = shared(*own, sight)
            found[way.__name__, name] = mixed, part.of(plain(q, k, v, sight).mT).mT, calls.seen
            for window in (1, 2, 3, 7):  # a chunk has 2 tokens
                narrow = Sight.within(window, sight, q, 0.0)
                expected = part.of(plain(q, k, v, narrow).mT).mT
                found[way.__name__, name, window] = shared(*own, narrow), expected, None
    return found


def test_ranks_that_share_sequences_mix_the_values_of_one_rank():
    for rank, found in enumerate(run_ranks(mixed_on_ranks, 2)):
        for mixed, expected, _ in found.values():
            torch.testing.assert_close(mixed, expected, rtol=1e-5, atol=1e-5)
        keys = [(rank + 1) * 2, 8 - rank * 2]  # of two chunks of queries, early and late
        calls = {name: seen for name, (*_, seen) in found.items() if seen}
        scale, apart = {"scale": 0.3}, (torch.float32, (2, 1, 8, 8))
        assert calls["Exchanged", "all"] == [((2, 8), (1, 8), None, CAUSAL | GROUPS | scale)]
        assert calls["Exchanged", "apart"] == [((2, 8), (1, 8), apart, GROUPS | scale)]
        assert calls["Gathered", "apart"] == [
            ((4, 2), (2, last), (torch.float32, (2, 1, 2, last)), GROUPS | scale) for last in keys
        ]
        assert calls["Gathered", "all"] == [
            ((4, 2), (2, 2), None, CAUSAL | GROUPS | scale)
            if last == 2
            else ((4, 2), (2, last), ("lower right", 2, last), GROUPS | scale)
            for last in keys
        ]
