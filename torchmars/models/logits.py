"""The largest logit of each head of attention, as an operation of its own.

Compiled blocks call it as it is: what they compute besides stays as it was.
"""

import torch
from torch import Tensor

# Logits that are made at once, and queries at most: so their memory does not grow with the square
# of the length, and of keys after the last of these queries none is multiplied.
ELEMENTS = 2**24
QUERIES = 256


def largest_logits(
    q: Tensor, k: Tensor, scale: float, since: Tensor | None = None, window: int = 0
) -> Tensor:
    """Return the largest `scale` times q k of each head [heads], float32, without a gradient.

    `q` [batch, heads, queries, width] are of the last of the tokens of `k` [batch, heads or fewer,
    keys, width]. A token sees itself and those before it: the last `window` with itself, if that is
    not 0, and none before the place `since` [batch, queries], if that is there.
    """
    found: Tensor = largest_op(q.detach(), k.detach(), scale, since, window)
    return found


@torch.library.custom_op("torchmars::largest_logits", mutates_args=())
def largest_op(q: Tensor, k: Tensor, scale: float, since: Tensor | None, window: int) -> Tensor:
    (batch, heads, queries, _), (_, groups, keys, _) = q.shape, k.shape
    q, k = (part.float() for part in (q.unflatten(1, (groups, -1)), k.mT))
    largest = q.new_full((groups, heads // groups), -torch.inf)
    size = max(1, min(QUERIES, ELEMENTS // (batch * heads * keys)))
    for first in range(0, queries, size):
        some = q[..., first : first + size, :]
        places = torch.arange(some.shape[3], device=q.device)[:, None] + keys - queries + first
        end = keys - queries + first + some.shape[3]
        begin = max(0, end - some.shape[3] - window + 1) if window else 0
        logits = (some.flatten(2, 3) @ k[..., begin:end]).unflatten(2, some.shape[2:4])
        others = torch.arange(begin, end, device=q.device)
        seen = (others <= places) & (others > places - (window or keys))
        if since is not None:
            seen = seen & (others >= since[:, first : first + size, None])[:, None, None]
        largest = largest.maximum(logits.masked_fill_(~seen, -torch.inf).amax((0, 3, 4)))
    return largest.flatten() * scale


@largest_op.register_fake
def _(q: Tensor, k: Tensor, scale: float, since: Tensor | None, window: int) -> Tensor:
    return q.new_empty(q.shape[1], dtype=torch.float32)
