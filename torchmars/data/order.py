"""The global order of the data: sample i of a run is one fixed window, whatever the layout.

It is of the part that the weights give it to (see mixture.py), and there it is the next one of that
part's own order.
"""

import hashlib
import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from torchmars.data.shares import Shares

Place = tuple[int, int]  # a part of a mixture, and one of its windows
AT_ONCE = 1024  # samples whose places are found by one call, or those of a step if they are more


def windows_of(numbers: np.ndarray, n_windows: int, seed: int) -> np.ndarray:
    """Return the windows [n] that samples number `numbers` [n] of a corpus read; all uint64.

    Each epoch is a seeded permutation of all windows. It needs no table: a Feistel network over the
    next power of four permutes more numbers than there are windows, and is applied again until it
    gives one of them ("cycle walking", Black and Rogaway 2002).
    """
    epochs, windows = np.divmod(numbers, n_windows)
    epochs, epoch_of = np.unique(epochs, return_inverse=True)
    keys = [
        hashlib.blake2b(f"{seed}/{epoch}".encode(), digest_size=64).digest()
        for epoch in epochs.tolist()
    ]
    round_keys = np.frombuffer(b"".join(keys), ">u8").astype(np.uint64).reshape(-1, 8)[epoch_of].T
    half = max(1, ((n_windows - 1).bit_length() + 1) // 2)
    outside = np.arange(len(windows))
    while len(outside):
        left, right = windows[outside] >> half, windows[outside] & (1 << half) - 1
        for round_key in round_keys[:, outside]:
            x = right ^ round_key  # then the finaliser of SplitMix64 (Steele et al. 2014)
            x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9
            x = (x ^ x >> 27) * 0x94D049BB133111EB
            left, right = right, left ^ (x ^ x >> 31) & (1 << half) - 1
        windows[outside] = left << half | right
        outside = outside[windows[outside] >= n_windows]
    return windows


def places_of(
    samples: np.ndarray, shares: Shares, lengths: Sequence[int], seed: int
) -> list[Place]:
    """Return the places that `samples` [n] read; `lengths` are the windows of each part."""
    parts, numbers = shares.parts_of(samples)
    for part in set(parts.tolist()):
        mine = parts == part
        numbers[mine] = windows_of(numbers[mine], lengths[part], seed)
    return list(zip(parts.tolist(), numbers.tolist()))


def rank_places(
    position: int,
    shares: Shares,
    lengths: Sequence[int],
    seed: int,
    global_batch_size: int,
    microbatch_size: int,
    rank: int,
    ranks: int,
) -> Iterator[list[Place]]:
    """Yield the places of a rank's microbatches, step after step, without end.

    They begin at global sample `position`. A step takes the next `global_batch_size` samples. Of R
    ranks, rank r takes the r-th of R equal runs of them.
    """
    share = global_batch_size // ranks
    steps = global_batch_size * np.arange(-(-AT_ONCE // share))
    mine = np.add.outer(steps, rank * share + np.arange(share)).flatten()
    for first in itertools.count(position, global_batch_size * len(steps)):
        places = places_of(first + mine, shares, lengths, seed)
        for begin in range(0, len(places), microbatch_size):
            yield places[begin : begin + microbatch_size]
