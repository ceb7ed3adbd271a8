"""Documents that share a sequence, kept apart: each is computed as if it were alone.

An end-of-text token begins a document: it is the first token that the document's others attend to.
"""

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

# `document_starts` is as wide as a multiple of this: where each batch had its own width, torch
# would compile, and CUDA keep memory, for each.
WIDTHS = 16


def document_starts(tokens: Tensor, end_of_text: int) -> Tensor:
    """Return where the documents of `tokens` [batch, length] begin, int32 [batch, documents].

    A sequence begins with a document, or with the rest of one. Places of a sequence that has fewer
    documents than the width, a multiple of `WIDTHS`, are filled with the length. `tokens` are on
    the CPU: how many documents there are is not known before they are counted, and a GPU would have
    to be waited for.
    """
    begins = tokens.numpy() == end_of_text
    begins[:, 0] = True
    numbers = begins.cumsum(axis=1) - 1
    rows, places = begins.nonzero()
    width = math.ceil((int(numbers.max()) + 1) / WIDTHS) * WIDTHS
    starts = torch.full((len(tokens), width), tokens.shape[1], dtype=torch.int32)
    starts.numpy()[rows, numbers[rows, places]] = places
    return starts


def document_numbers(starts: Tensor, length: int) -> Tensor:
    """Return the number of the document of each token, [batch, length]."""
    places = torch.arange(length, dtype=starts.dtype, device=starts.device)
    return torch.searchsorted(starts, places.repeat(len(starts), 1), right=True) - 1


def document_positions(starts: Tensor, length: int) -> Tensor:
    """Return the position of each token in its document, [batch, length]."""
    places = torch.arange(length, device=starts.device)
    return places - starts.gather(1, document_numbers(starts, length))


def bounds(starts: Tensor, first: int, count: int) -> Tensor:
    """Return where documents begin and end among tokens [first, first + count), end to end.

    Those outside of them, and those that fill `starts`, have no tokens.
    """
    rows = torch.arange(len(starts), dtype=torch.int32, device=starts.device)
    inside = starts.clamp(first, first + count) - first + count * rows[:, None]
    return F.pad(inside.flatten(), (0, 1), value=count * len(rows))


def has_kernel(device: str, dtype: torch.dtype, dropout: float) -> bool:
    """Return whether a kernel computes attention inside documents, without a mask in memory."""
    return device == "cuda" and dtype in (torch.bfloat16, torch.float16) and not dropout


class Documents(NamedTuple):
    """The documents of whole sequences, as attention takes them. All blocks share one."""

    starts: Tensor
    """Where they begin, as `document_starts` returns it."""
    mask: Tensor | None
    """What is added to logits, [batch, 1, length, length]: 0, or -inf for a token of another
    document and for a later one. None: a kernel takes `bounds`."""
    length: int
    """Tokens of a sequence."""
    whole: Tensor | None
    """The `bounds` of whole sequences, for the kernel."""

    @classmethod
    def of(cls, starts: Tensor, length: int, x: Tensor, dropout: float) -> "Documents":
        """Make those of sequences of `length` tokens, for blocks that get `x`."""
        if has_kernel(x.device.type, x.dtype, dropout):
            return cls(starts, None, length, bounds(starts, 0, length))
        numbers = document_numbers(starts, length)
        # In the dtype of `x`: of a boolean mask each block would make such a one of its own.
        mask = torch.zeros(len(starts), 1, length, length, dtype=x.dtype, device=x.device)
        seen = (numbers[:, None, :, None] == numbers[:, None, None, :]).tril_()
        return cls(starts, mask.masked_fill_(seen.logical_not_(), -torch.inf), length, None)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
        """Return the mixed values [batch, heads, queries, head width].

        `k` and `v` [batch, heads or fewer, keys, head width] are of the first tokens of the
        sequences, and `q` [batch, heads, queries, head width] of the last ones of those.
        """
        queries, keys = q.shape[2], k.shape[2]
        if self.mask is None:
            # It brings torch's compiler, a second that a launcher has no use for.
            from torchmars.models.document_kernel import attend_by_kernel

            of_queries, of_keys = self.bounds(keys - queries, queries), self.bounds(0, keys)
            return attend_by_kernel(q, k, v, of_queries, of_keys)
        mask = self.mask[:, :, keys - queries : keys, :keys]
        return mixed_values(q, k, v, dropout, attn_mask=mask)

    def bounds(self, first: int, count: int) -> Tensor:
        """Return what `bounds` does, without making again what all blocks share."""
        if self.whole is not None and count == self.length:
            return self.whole
        return bounds(self.starts, first, count)


def mixed_values(q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0, **mask: Any) -> Tensor:
    """Return attention by torch, with `attn_mask` or `is_causal`; `k`, `v` may have fewer heads."""
    grouped = k.shape[1] != q.shape[1]
    if grouped and not takes_groups(q, mask.get("attn_mask")):
        k, v, grouped = repeated(k, q), repeated(v, q), False
    return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, enable_gqa=grouped, **mask)


def takes_groups(q: Tensor, mask: Tensor | None) -> bool:
    """Return whether torch takes fewer heads of keys and values without making all logits.

    On GPUs flash attention alone does, for 16 bits and without a mask or with torch's causal one.
    On CPUs repeated ones would cost memory, and took 8% longer.
    """
    if q.device.type != "cuda":
        return True
    # It brings torch's compiler, a second that a launcher has no use for.
    from torch.nn.attention.bias import CausalBias

    flash = mask is None or isinstance(mask, CausalBias)
    return flash and q.dtype in (torch.bfloat16, torch.float16)


def repeated(part: Tensor, q: Tensor) -> Tensor:
    """Return keys or values with as many heads as the queries have."""
    return part.repeat_interleave(q.shape[1] // part.shape[1], dim=1)
