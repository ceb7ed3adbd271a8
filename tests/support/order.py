"""The order of samples by Python's own integers, one sample at a time: slow, clear and exact."""

import hashlib
from collections.abc import Sequence

from torchmars.data.order import Shares

ALL = 2**64 - 1


def window_of_sample(sample: int, n_windows: int, seed: int) -> int:
    """Return the window that sample number `sample` of a corpus reads."""
    epoch, number = divmod(sample, n_windows)
    half = max(1, ((n_windows - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    key = hashlib.blake2b(f"{seed}/{epoch}".encode(), digest_size=64).digest()
    while True:
        left, right = number >> half, number & mask
        for place in range(0, 64, 8):
            x = right ^ int.from_bytes(key[place : place + 8], "big")
            x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & ALL
            x = (x ^ x >> 27) * 0x94D049BB133111EB & ALL
            left, right = right, left ^ ((x ^ x >> 31) & mask)
        number = left << half | right
        if number < n_windows:
            return number


def place_of_sample(
    sample: int, shares: Shares, lengths: Sequence[int], seed: int
) -> tuple[int, int]:
    """Return the part and the window that a sample reads; `lengths` are the parts' windows."""
    before, after = shares.counts(sample), shares.counts(sample + 1)
    part = next(part for part in range(len(before)) if after[part] > before[part])
    return part, window_of_sample(before[part], lengths[part], seed)
