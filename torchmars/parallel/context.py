"""Context parallelism: each rank has a part of every sequence, and attention sees all of it.

Parts are balanced for the causal mask, under which later tokens attend to more. A sequence is cut
into 2 cp chunks, and rank r has chunks r and 2 cp - 1 - r: one early and one late.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import (  # private, torch 2.11 to 2.13
    all_gather_tensor_autograd,
    all_to_all_single_autograd,
)
from torch.nn.attention.bias import CausalBias, causal_lower_right
from torch.utils._mode_utils import no_dispatch  # private, torch 2.11 to 2.13

from torchmars.models import Model
from torchmars.models.attention import CausalAttention
from torchmars.models.documents import Documents, mixed_values


@dataclass(frozen=True)
class SequencePart:
    """The part of every sequence that a rank of a cp group works on."""

    rank: int = 0
    ranks: int = 1

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


class GatheredAttention(CausalAttention):
    """Attends from this rank's part of each sequence to the keys and values of all of it.

    Each rank gathers them. Source: Llama 3 (arXiv 2407.21783), section 3.3.2.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group, self.rank = group, dist.get_rank(group)
        self.make_mask: Callable[[int, int], Tensor | None] = lower_right_mask

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        documents: Documents | None = None,
        dropout: float = 0.0,
    ) -> Tensor:
        ranks = dist.get_world_size(self.group)
        k, v = (
            in_order(all_gather_tensor_autograd(part.contiguous(), 2, self.group), ranks)
            for part in (k, v)
        )
        early, late = q.chunk(2, dim=2)
        chunk = early.shape[2]
        ends = (self.rank + 1) * chunk, k.shape[2] - self.rank * chunk
        parts = [
            self._attend(queries, k[:, :, :end], v[:, :, :end], documents, dropout)
            for queries, end in zip((early, late), ends)
        ]
        return torch.cat(parts, dim=2)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, documents: Documents | None, dropout: float
    ) -> Tensor:
        if documents is not None:
            return documents.attend(q, k, v, dropout)
        mask = self.make_mask(q.shape[2], k.shape[2])
        return mixed_values(q, k, v, dropout, attn_mask=mask)


def lower_right_mask(queries: int, keys: int) -> CausalBias:
    """Return the mask of the last `queries` of `keys` tokens, as attention takes it."""
    if torch.compiler.is_compiling():
        return causal_lower_right(queries, keys)
    # It is a tensor, which modes of torch, such as selective activation checkpointing, would make
    # one of another type.
    with no_dispatch():
        return causal_lower_right(queries, keys)


class UlyssesAttention(CausalAttention):
    """Exchanges parts of the sequences for heads, attends over all of them, and exchanges back.

    Source: Jacobs et al. 2023, "DeepSpeed Ulysses", arXiv 2309.14509.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group, self.ranks = group, dist.get_world_size(group)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        documents: Documents | None = None,
        dropout: float = 0.0,
    ) -> Tensor:
        q, k, v = (in_order(self._heads_for_sequence(part), self.ranks) for part in (q, k, v))
        mixed = by_rank(super().forward(q, k, v, documents, dropout), self.ranks)
        parts = torch.stack(mixed.chunk(self.ranks, dim=2))
        return torch.cat(self._exchange(parts).unbind(), dim=1)

    def _heads_for_sequence(self, x: Tensor) -> Tensor:
        """Return some heads of all tokens for all heads of some tokens, rank after rank."""
        heads = torch.stack(x.chunk(self.ranks, dim=1))
        return torch.cat(self._exchange(heads).unbind(), dim=2)

    def _exchange(self, parts: Tensor) -> Tensor:
        """Give part r of `parts` [ranks, ...] to rank r; return what the ranks gave."""
        return all_to_all_single_autograd(parts, None, None, self.group)


def in_order(x: Tensor, ranks: int) -> Tensor:
    """Return `x` [batch, heads, length, width], whose parts lie rank after rank, in order."""
    chunks = x.chunk(2 * ranks, dim=2)
    return torch.cat([*chunks[0::2], *chunks[::-2]], dim=2)


def by_rank(x: Tensor, ranks: int) -> Tensor:
    """Return `x` [batch, heads, length, width], which is in order, with parts rank after rank."""
    chunks = x.chunk(2 * ranks, dim=2)
    return torch.cat([chunks[place] for rank in range(ranks) for place in (rank, -1 - rank)], dim=2)


def share_sequences(
    model: Model, group: dist.ProcessGroup, method: Literal["all-gather", "ulysses"]
) -> None:
    """Let every attention of `model` see whole sequences, of which each rank has a part."""
    kind = GatheredAttention if method == "all-gather" else UlyssesAttention
    for block in model.blocks.values():
        block.set_submodule("attn.attend", kind(group))
