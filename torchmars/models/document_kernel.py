"""Attention inside documents by torch's kernel for sequences of several lengths, on GPUs."""

import inspect
from typing import Any

from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

# torch 2.11 has no such option. There the keys and values are repeated.
TAKES_GROUPS = "enable_gqa" in inspect.signature(varlen_attn).parameters


def mix_documents(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    of_queries: Tensor,
    of_keys: Tensor,
    scale: float | None,
    window: int | None = None,
) -> Tensor:
    """Return the mixed values, by the `bounds` of documents among queries and keys.

    Each query sees the last `window` keys of its document up to its own, or all of them.
    """
    batch, queries, keys = len(q), q.shape[2], k.shape[2]
    groups: dict[str, Any] = {}
    if k.shape[1] != q.shape[1] and TAKES_GROUPS:
        groups["enable_gqa"] = True
    elif k.shape[1] != q.shape[1]:
        k, v = (part.repeat_interleave(q.shape[1] // part.shape[1], dim=1) for part in (k, v))
    q, k, v = (part.transpose(1, 2).flatten(0, 1) for part in (q, k, v))
    # The kernel counts keys before a query's own, and -1 are all: the last query of a document sees
    # the last keys of it, up to its own.
    sizes = (-1 if window is None else window - 1, 0)
    mixed = varlen_attn(
        q, k, v, of_queries, of_keys, queries, keys, scale=scale, window_size=sizes, **groups
    )
    assert isinstance(mixed, Tensor)
    return mixed.unflatten(0, (batch, queries)).transpose(1, 2)
