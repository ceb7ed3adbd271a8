"""Context parallelism: each rank has a part of every sequence, and attention sees all of it.

Parts are balanced for the causal mask, under which later tokens attend to more. A sequence is cut
into 2 cp chunks, and rank r has chunks r and 2 cp - 1 - r: one early and one late.
"""

from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import (  # private, torch 2.11 to 2.15
    all_gather_tensor_autograd,
    all_to_all_single_autograd,
)

from torchmars.models.attention import Mix
from torchmars.parallel.layout import Layout


@dataclass(frozen=True)
class SequencePart:
    """The part of every sequence that a rank of a cp group works on."""

    rank: int = 0
    ranks: int = 1

    @classmethod
    def on(cls, layout: Layout) -> "SequencePart":
        """Return the part of this rank."""
        group = layout.group("cp")
        return cls(group.rank, group.size)

    def of(self, tokens: Tensor) -> Tensor:
        """Return this rank's part [batch, length / ranks] of whole sequences [batch, length]."""
        if self.ranks == 1:
            return tokens
        chunks = tokens.chunk(2 * self.ranks, dim=-1)
        return torch.cat([chunks[self.rank], chunks[-1 - self.rank]], dim=-1)

    def positions(self, length: int, device: torch.device) -> Tensor:
        """Return the positions of the `length` tokens of a part."""
        return self.of(torch.arange(length * self.ranks, device=device))

    def place(self, position: int, length: int) -> int | None:
        """Return which of the `length` tokens of a part is the one at `position`; None if none."""
        found = (self.positions(length, torch.device("cpu")) == position).nonzero()
        return int(found) if len(found) else None


class Gathered:
    """Lets the queries of this rank's part of each sequence see keys and values of all of it.

    Each rank gathers them. Source: Llama 3 (arXiv 2407.21783), section 3.3.2.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank = group, dist.get_rank(group)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mix: Mix) -> Tensor:
        """Mix the values of all tokens for both chunks of queries."""
        k, v = (whole_sequences(part, self.group) for part in (k, v))
        early, late = q.chunk(2, dim=2)
        chunk = early.shape[2]
        ends = (self.rank + 1) * chunk, k.shape[2] - self.rank * chunk
        parts = [
            mix(queries, k[:, :, :end], v[:, :, :end]) for queries, end in zip((early, late), ends)
        ]
        return torch.cat(parts, dim=2)


class Exchanged:
    """Exchanges parts of the sequences for heads, mixes all of them, and exchanges back.

    Source: Jacobs et al. 2023, "DeepSpeed Ulysses", arXiv 2309.14509.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.ranks = group, dist.get_world_size(group)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mix: Mix) -> Tensor:
        """Mix the values of all tokens for some heads.

        What is one head for all queries, of which `mix` makes theirs, every rank gets whole.
        """
        shared = k.shape[1] == 1 < q.shape[1]
        q = by_position(self._heads_for_sequence(q), self.ranks)
        if shared:
            k, v = (whole_sequences(part, self.group) for part in (k, v))
            mix = partial(mix, first=dist.get_rank(self.group) * q.shape[1])
        else:
            k, v = (by_position(self._heads_for_sequence(part), self.ranks) for part in (k, v))
        mixed = by_rank(mix(q, k, v), self.ranks)
        parts = torch.stack(mixed.chunk(self.ranks, dim=2))
        return torch.cat(self._exchange(parts).unbind(), dim=1)

    def _heads_for_sequence(self, x: Tensor) -> Tensor:
        """Return some heads of all tokens for all heads of some tokens, rank after rank."""
        heads = torch.stack(x.chunk(self.ranks, dim=1))
        return torch.cat(self._exchange(heads).unbind(), dim=2)

    def _exchange(self, parts: Tensor) -> Tensor:
        """Give part r of `parts` [ranks, ...] to rank r; return the parts from all ranks."""
        return all_to_all_single_autograd(parts, None, None, self.group)


def whole_sequences(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return all ranks' parts of `x` [batch, heads, length, width], in order."""
    gathered = all_gather_tensor_autograd(x.contiguous(), 2, group)
    return by_position(gathered, dist.get_world_size(group))


def by_position(x: Tensor, ranks: int) -> Tensor:
    """Return `x` [batch, heads, length, width], whose parts lie rank after rank, in order."""
    chunks = x.chunk(2 * ranks, dim=2)
    return torch.cat([*chunks[0::2], *chunks[::-2]], dim=2)


def by_rank(x: Tensor, ranks: int) -> Tensor:
    """Return `x` [batch, heads, length, width], which is in order, with parts rank after rank."""
    chunks = x.chunk(2 * ranks, dim=2)
    return torch.cat([chunks[place] for rank in range(ranks) for place in (rank, -1 - rank)], dim=2)
