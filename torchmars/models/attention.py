"""Causal attention: the one place where a token's hidden state depends on other tokens.

`CausalAttention.mix` alone makes masks and calls kernels. How keys and values get there is another
matter, its `reach`: context parallelism and the cache of a sampler replace that.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._mode_utils import no_dispatch  # private, torch 2.11 to 2.15

from torchmars.core.device import is_gpu
from torchmars.models.documents import bounds, document_numbers
from torchmars.models.logits import largest_logits

# Makes mixed values [batch, heads, queries, width of a value] of queries [batch, heads, queries,
# width], keys [batch, heads or fewer, keys, width] and values [..., width of a value]. The queries
# are those of the last tokens. Where all heads share one of keys that `mix` makes theirs from,
# `first` says which heads the queries are of.
Mix = Callable[..., Tensor]
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
    since: Tensor | None = None
    """The first place that each token sees, [batch, all tokens]. None: all see place 0."""
    window: int | None = None
    """How many tokens one sees at most, itself included; None: any number."""

    @classmethod
    def of_documents(cls, starts: Tensor, length: int, x: Tensor, dropout: float) -> "Sight":
        """Keep documents apart in sequences of `length` tokens, for blocks that get `x`."""
        if has_kernel(x.device.type, x.dtype, dropout):
            return cls(None, starts, length, bounds(starts, 0, length))
        numbers = document_numbers(starts, length)
        # In the dtype of `x`: of a boolean mask each block would make such a one of its own.
        mask = torch.zeros(len(starts), 1, length, length, dtype=x.dtype, device=x.device)
        since, places = starts.gather(1, numbers), torch.arange(length, device=x.device)
        mask.masked_fill_(seen(since, places, places)[:, None].logical_not_(), -torch.inf)
        return cls(mask, since=since, length=length)

    @classmethod
    def after_padding(cls, padding: Tensor, places: Tensor, device: torch.device) -> "Sight":
        """Let the tokens at `places`, the last ones, see no padding: the first `padding` [batch].

        Both are on the CPU, and what is made of them goes to `device`.
        """
        if len(places) == 1 and not padding.any():
            return cls()
        keys = torch.arange(int(places[-1]) + 1)
        # Padding sees itself: what sees nothing would be NaN.
        since = torch.minimum(padding[:, None], keys)
        mask = seen(since[:, places], places, keys)[:, None]
        return cls(mask.to(device), since=since.to(device))

    @classmethod
    def within(cls, window: int, sight: "Sight | None", x: Tensor, dropout: float) -> "Sight":
        """Let each token see no more than `window` tokens of those that `sight` lets it see."""
        if sight is not None:
            return sight._replace(window=window)
        # The kernel of documents takes a window: each sequence is a document.
        if not has_kernel(x.device.type, x.dtype, dropout):
            return cls(window=window)
        starts = torch.zeros(len(x), 1, dtype=torch.int32, device=x.device)
        length = x.shape[1]
        return cls(None, starts, length, bounds(starts, 0, length), window=window)

    def mask_of(self, queries: int, keys: int) -> Tensor | None:
        """Return which of the first `keys` tokens the last `queries` of them see, but for a window.

        None: all before them.
        """
        if self.mask is None:
            return None
        first = self.mask.shape[3] - self.mask.shape[2]
        return self.mask[:, :, keys - queries - first : keys - first, :keys]

    def mask_of_window(self, queries: int, keys: int, device: torch.device) -> Tensor:
        """Return which of the first `keys` tokens the last `queries` of them see in the window."""
        assert self.window is not None
        places = torch.arange(keys, device=device)
        since = places[None, -queries:] - self.window + 1
        if (own := self.since_of(keys - queries, queries)) is not None:
            since = torch.maximum(since, own)
        return seen(since, places[-queries:], places)[:, None]

    def since_of(self, first: int, count: int) -> Tensor | None:
        """Return the first place that tokens [first, first + count) see, [batch, count].

        None: place 0.
        """
        since = self.since
        if since is None and self.starts is not None:
            since = self.starts.gather(1, document_numbers(self.starts, first + count))
        return None if since is None else since[:, first : first + count]

    def bounds_of(self, first: int, count: int) -> Tensor:
        """Return the `bounds` of documents, which all blocks share and make once."""
        assert self.starts is not None
        if self.whole is not None and count == self.length:
            return self.whole
        return bounds(self.starts, first, count)


def seen(since: Tensor, places: Tensor, keys: Tensor) -> Tensor:
    """Return which tokens at `keys` [keys] those at `places` [queries] see, all from `since` on.

    `since` is [batch, queries], and the result [batch, queries, keys].
    """
    return (keys <= places[:, None]) & (keys >= since[:, :, None])


class CausalAttention(nn.Module):
    """Scaled dot-product attention of each token to itself and to earlier ones.

    It has no weights. `scale` multiplies logits; None: one over the root of a key's width. What
    else is a block's own, such as a window, sinks, or a cap of logits, would stand beside it.
    """

    watched: Tensor | None = None
    """Where it is set [heads that mix here], float32, the largest logit of each is noted there."""

    def __init__(self, scale: float | None = None) -> None:
        super().__init__()
        self.scale = scale
        self.reach: Reach = here

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sight: Sight | None = None,
        dropout: float = 0.0,
        **more: Any,
    ) -> Tensor:
        """Return the mixed values [batch, heads, length, width of a value].

        `q` and `k` are [batch, heads, length, width]; `v` may have another width. `k` and `v` may
        have fewer heads, each for several of `q` (grouped-query attention, Ainslie et al. 2023,
        arXiv 2305.13245). Without `sight` tokens see all before them. What a class that derives
        from this one needs `more` to mix goes to its `mix`.
        """
        return self.reach(q, k, v, partial(self.mix, sight=sight, dropout=dropout, **more))

    def mix(self, q: Tensor, k: Tensor, v: Tensor, sight: Sight | None, dropout: float) -> Tensor:
        """Return the mixed values of queries, which belong to the last of the tokens."""
        queries, keys, own, width = q.shape[2], k.shape[2], q.shape[3], v.shape[3]
        scale, sight = self.scale, sight if sight is not None else Sight()
        if self.watched is not None:
            since = sight.since_of(keys - queries, queries)
            factor = own**-0.5 if scale is None else scale
            found = largest_logits(q, k, factor, since, sight.window or 0)
            self.watched.copy_(self.watched.maximum(found))
        if width != own:
            # Fused kernels want one width. Zeros change no logit, and are cut off the values.
            scale = own**-0.5 if scale is None else scale
            q, k, v = (F.pad(part, (0, max(width, own) - part.shape[3])) for part in (q, k, v))
        if sight.starts is not None:
            # It brings torch's compiler, a second that a launcher has no use for.
            from torchmars.models.document_kernel import mix_documents

            of_queries, of_keys = sight.bounds_of(keys - queries, queries), sight.bounds_of(0, keys)
            mixed = mix_documents(q, k, v, of_queries, of_keys, scale, sight.window)
        else:
            given = sight.mask_of(queries, keys)
            if sight.window is not None and sight.window < keys:
                given = sight.mask_of_window(queries, keys, q.device)
            elif given is None and 1 < queries < keys:
                given = lower_right(queries, keys)
            mixed = mix_by_torch(q, k, v, given, dropout, scale)
        return mixed if mixed.shape[3] == width else mixed[..., :width]


def mix_by_torch(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float, scale: float | None
) -> Tensor:
    """Return the mixed values. Without `mask`, all queries see all keys, or those before them."""
    causal, grouped = mask is None and q.shape[2] == k.shape[2], k.shape[1] != q.shape[1]
    if grouped and not takes_groups(q, mask is None or type(mask) is not Tensor):
        times, grouped = q.shape[1] // k.shape[1], False
        k, v = (part.repeat_interleave(times, dim=1) for part in (k, v))
    return F.scaled_dot_product_attention(
        q, k, v, mask, dropout, is_causal=causal, scale=scale, enable_gqa=grouped
    )


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
