"""What attention takes of torch that brings its compiler, a second: imported where it is used."""

import inspect
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.bias import CausalBias, causal_lower_right
from torch.nn.attention.varlen import varlen_attn
from torch.utils._mode_utils import no_dispatch  # private, torch 2.11 to 2.13

# torch 2.11 has no such option. There the keys and values are repeated.
TAKES_GROUPS = "enable_gqa" in inspect.signature(varlen_attn).parameters


def lower_right_bias(queries: int, keys: int) -> CausalBias:
    """Return the mask of the last `queries` of `keys` tokens, as torch's attention takes it."""
    if torch.compiler.is_compiling():
        return causal_lower_right(queries, keys)
    # It is a tensor, which modes of torch, such as selective activation checkpointing, would make
    # one of another type.
    with no_dispatch():
        return causal_lower_right(queries, keys)


def mix_documents(
    q: Tensor, k: Tensor, v: Tensor, of_queries: Tensor, of_keys: Tensor, scale: float | None
) -> Tensor:
    """Return attention by the `bounds` of documents among queries and keys, on a GPU."""
    batch, queries, keys = len(q), q.shape[2], k.shape[2]
    groups: dict[str, Any] = {}
    if k.shape[1] != q.shape[1] and TAKES_GROUPS:
        groups["enable_gqa"] = True
    elif k.shape[1] != q.shape[1]:
        k, v = (part.repeat_interleave(q.shape[1] // part.shape[1], dim=1) for part in (k, v))
    q, k, v = (part.transpose(1, 2).flatten(0, 1) for part in (q, k, v))
    # This window is causal: the last query of a document sees all keys of it.
    mixed = varlen_attn(
        q, k, v, of_queries, of_keys, queries, keys, scale=scale, window_size=(-1, 0), **groups
    )
    assert isinstance(mixed, Tensor)
    return mixed.unflatten(0, (batch, queries)).transpose(1, 2)
