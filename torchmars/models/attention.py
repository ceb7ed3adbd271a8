"""Causal attention: the one place where a token's hidden state depends on other tokens.

`CausalAttention.mix` alone makes masks and calls kernels. How keys and values get there is another
matter, its `reach`: context parallelism and the cache of a sampler replace that.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._mode_utils import no_dispatch  # private, torch 2.11 to 2.13

from torchmars.core.device import is_gpu
from torchmars.models.documents import bounds, document_numbers

# Makes mixed values [batch, heads, queries, width of a value] of queries [batch, heads, queries,
# width], keys [batch, heads or fewer, keys, width] and values [..., width of a value]. The queries
# are those of the last tokens.
Mix = Callable[[Tensor, Tensor, Tensor], Tensor]
# Hands queries, and the keys and values that they may see, to a `Mix`.
Reach = Callable[[Tensor, Tensor, Tensor, Mix], Tensor]


class Sight(NamedTuple):
    """Which of the tokens before it each token of a pass sees. All blocks share one."""

    mask: Tensor | None = None
    """What the last tokens see of all, [batch, 1, last tokens, all tokens]: bools, or what is added
    to logits, 0 or -inf. None: all of them or, with `starts`, the own document."""
    starts: Tensor | None = None
    """Where documents begin, as `document_starts` returns it, for a kernel that takes `bounds`."""
    length: int = 0
    """Tokens of the sequences that have the documents."""
    whole: Tensor | None = None
    """The `bounds` of these sequences."""

    @classmethod
    def of_documents(cls, starts: Tensor, length: int, x: Tensor, dropout: float) -> "Sight":
        """Keep documents apart in sequences of `length` tokens, for blocks that get `x`."""
        if has_kernel(x.device.type, x.dtype, dropout):
            return cls(None, starts, length, bounds(starts, 0, length))
        numbers = document_numbers(starts, length)
        # In the dtype of `x`: of a boolean mask each block would make such a one of its own.
        mask = torch.zeros(len(starts), 1, length, length, dtype=x.dtype, device=x.device)
        seen = (numbers[:, None, :, None] == numbers[:, None, None, :]).tril_()
        return cls(mask.masked_fill_(seen.logical_not_(), -torch.inf))

    @classmethod
    def after_padding(cls, padding: Tensor, places: Tensor, device: torch.device) -> "Sight":
        """Let the tokens at `places`, the last ones, see no padding: the first `padding` [batch].

        Both are on the CPU, and what is made of them goes to `device`.
        """
        if len(places) == 1 and not padding.any():
            return cls()
        keys = torch.arange(int(places[-1]) + 1)
        earlier = keys <= places[:, None]
        # Padding sees itself: what sees nothing would be NaN.
        real = (keys >= padding[:, None, None]) | (keys == places[:, None])
        return cls((earlier & real)[:, None].to(device))

    def mask_of(self, queries: int, keys: int) -> Tensor | None:
        """Return which of the first `keys` tokens the last `queries` of them see."""
        if self.mask is None:
            return None
        first = self.mask.shape[3] - self.mask.shape[2]
        return self.mask[:, :, keys - queries - first : keys - first, :keys]

    def bounds_of(self, first: int, count: int) -> Tensor:
        """Return the `bounds` of documents, which all blocks share and make once."""
        assert self.starts is not None
        if self.whole is not None and count == self.length:
            return self.whole
        return bounds(self.starts, first, count)


class CausalAttention(nn.Module):
    """Scaled dot-product attention of each token to itself and to earlier ones.

    It has no weights. `scale` multiplies logits; None: one over the root of a key's width. What
    else is a block's own, such as a window, sinks, or a cap of logits, would stand beside it.
    """

    def __init__(self, scale: float | None = None) -> None:
        super().__init__()
        self.scale = scale
        self.reach: Reach = here
        self.make_mask: Callable[[int, int], Tensor | None] = lower_right
        """Makes the mask of the last of several tokens, where they see all before them."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, sight: Sight | None = None, dropout: float = 0.0
    ) -> Tensor:
        """Return the mixed values [batch, heads, length, width of a value].

        `q` and `k` are [batch, heads, length, width]; `v` may have another width. `k` and `v` may
        have fewer heads, each for several of `q` (grouped-query attention, Ainslie et al. 2023,
        arXiv 2305.13245). Without `sight` tokens see all before them.
        """
        return self.reach(q, k, v, partial(self.mix, sight=sight, dropout=dropout))

    def mix(self, q: Tensor, k: Tensor, v: Tensor, sight: Sight | None, dropout: float) -> Tensor:
        """Return the mixed values of queries, which belong to the last of the tokens."""
        queries, keys, own, width = q.shape[2], k.shape[2], q.shape[3], v.shape[3]
        scale, grouped = self.scale, k.shape[1] != q.shape[1]
        if width != own:
            # Fused kernels want one width. Zeros change no logit, and are cut off the values.
            scale = own**-0.5 if scale is None else scale
            q, k, v = (F.pad(part, (0, max(width, own) - part.shape[3])) for part in (q, k, v))
        if sight is not None and sight.starts is not None:
            # It brings torch's compiler, a second that a launcher has no use for.
            from torchmars.models.document_kernel import mix_documents

            of_queries = sight.bounds_of(keys - queries, queries)
            mixed = mix_documents(q, k, v, of_queries, sight.bounds_of(0, keys), scale)
        else:
            causal = sight is None and queries == keys
            if sight is not None:
                mask = sight.mask_of(queries, keys)
            else:
                mask = None if causal else self.make_mask(queries, keys)
            if grouped and not takes_groups(q, sight is None or mask is None):
                times, grouped = q.shape[1] // k.shape[1], False
                k, v = (part.repeat_interleave(times, dim=1) for part in (k, v))
            mixed = F.scaled_dot_product_attention(
                q, k, v, mask, dropout, is_causal=causal, scale=scale, enable_gqa=grouped
            )
        return mixed if mixed.shape[3] == width else mixed[..., :width]


def here(q: Tensor, k: Tensor, v: Tensor, mix: Mix) -> Tensor:
    """Mix all tokens, which are here: `CausalAttention.reach` on one rank."""
    return mix(q, k, v)


def lower_right(queries: int, keys: int) -> Tensor:
    """Return torch's causal mask of the last `queries` of `keys` tokens."""
    from torch.nn.attention.bias import causal_lower_right  # it brings torch's compiler too

    if torch.compiler.is_compiling():
        return causal_lower_right(queries, keys)
    # It is a tensor, which modes of torch, such as selective activation checkpointing, would make
    # one of another type.
    with no_dispatch():
        return causal_lower_right(queries, keys)


def has_kernel(device: str, dtype: torch.dtype, dropout: float) -> bool:
    """Return whether a kernel computes attention inside documents, without a mask in memory."""
    return is_gpu(device) and dtype in (torch.bfloat16, torch.float16) and not dropout


def takes_groups(q: Tensor, fused: bool) -> bool:
    """Return whether torch takes fewer heads of keys and values without making all logits.

    On GPUs flash attention alone does, for 16 bits and, `fused`, without a mask or with torch's
    causal one. On CPUs repeated ones would cost memory, and took 8% longer.
    """
    return not is_gpu(q.device.type) or (fused and q.dtype in (torch.bfloat16, torch.float16))
