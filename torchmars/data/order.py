"""The global order of the data: sample i of a run is one fixed window, whatever the layout.

It is of the part that the weights give it to (see mixture.py), and there it is the next one of that
part's own order.
"""

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.utils.data import Dataset

from torchmars.data.mixture import MixedWindows
from torchmars.data.shares import Shares


def window_of_sample(sample: int, n_windows: int, seed: int) -> int:
    """Return the window that sample number `sample` of a corpus reads.

    Each epoch is a seeded permutation of all windows. It needs no table: a Feistel network over the
    next power of four permutes more numbers than there are windows, and is applied again until it
    gives one of them ("cycle walking", Black and Rogaway 2002).
    """
    epoch, number = divmod(sample, n_windows)
    half = max(1, ((n_windows - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    key = hashlib.blake2b(f"{seed}/{epoch}".encode(), digest_size=64).digest()
    round_keys = [int.from_bytes(key[place : place + 8], "big") for place in range(0, 64, 8)]
    while True:
        left, right = number >> half, number & mask
        for round_key in round_keys:
            left, right = right, left ^ (_mix(right ^ round_key) & mask)
        number = left << half | right
        if number < n_windows:
            return number


def _mix(x: int) -> int:
    """Return a 64-bit hash of an integer (the finaliser of SplitMix64, Steele et al. 2014)."""
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    x = (x ^ x >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    return x ^ x >> 31


def place_of_sample(
    sample: int, shares: Shares, lengths: Sequence[int], seed: int
) -> tuple[int, int]:
    """Return the part and the window that a sample reads; `lengths` are the parts' windows."""
    part, number = shares.part_of(sample)
    return part, window_of_sample(number, lengths[part], seed)


@dataclass(frozen=True, eq=False)
class Samples(Dataset):
    """The windows in the global order: where a process reads one, it also finds its place."""

    windows: MixedWindows
    shares: Shares
    seed: int

    def __getitem__(self, sample: int) -> Tensor:
        """Return token ids [T + 1], int64. Raises `ChangedData`."""
        return self.windows[place_of_sample(sample, self.shares, self.windows.lengths, self.seed)]


def rank_samples(
    position: int, global_batch_size: int, microbatch_size: int, rank: int, ranks: int
) -> Iterator[list[int]]:
    """Yield the samples of a rank's microbatches, step after step, without end.

    They begin at global sample `position`. A step takes the next `global_batch_size` samples. Of R
    ranks, rank r takes the r-th of R equal runs of them.
    """
    share = global_batch_size // ranks
    for first in itertools.count(position + rank * share, global_batch_size):
        for begin in range(first, first + share, microbatch_size):
            yield list(range(begin, begin + microbatch_size))
