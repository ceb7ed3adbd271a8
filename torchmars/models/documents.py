"""Documents that share a sequence, kept apart: each is computed as if it were alone.

An end-of-text token begins a document: it is the first token that the document's others attend to.
Where documents begin with a token of their own, after the one that ends the document before, that
token is the first one: both are one border.
"""

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

# `document_starts` is as wide as a multiple of this: where each batch had its own width, torch
# would compile, and CUDA keep memory, for each.
WIDTHS = 16


def begins(tokens: np.ndarray, end_of_text: int, begin_token: int | None = None) -> np.ndarray:
    """Return whether a document begins at each of `tokens` [..., length] for what they show.

    It begins at an end-of-text token; with a `begin_token`, at that token after such a one. Whether
    the first of `tokens` is one of these, those before it would tell.
    """
    ends = tokens == end_of_text
    if begin_token is None:
        return ends
    found = np.zeros_like(ends)
    found[..., 1:] = ends[..., :-1] & (tokens[..., 1:] == begin_token)
    return found


def document_starts(tokens: Tensor, end_of_text: int, begin_token: int | None = None) -> Tensor:
    """Return where the documents of `tokens` [batch, length] begin, int32 [batch, documents].

    A sequence begins with a document, or with the rest of one. Places of a sequence that has fewer
    documents than the width, a multiple of `WIDTHS`, are filled with the length. `tokens` are on
    the CPU: how many documents there are is not known before they are counted, and a GPU would have
    to be waited for.
    """
    found = begins(tokens.numpy(), end_of_text, begin_token)
    found[:, 0] = True
    numbers = found.cumsum(axis=1) - 1
    rows, places = found.nonzero()
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
