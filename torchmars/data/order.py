"""The global order of the data: sample i of a run is one fixed window, whatever the layout.

It is of the part of a mixture that `Shares` deal it to, and there it is the next one of that part's
own order.
"""

import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from typing import Annotated, TypeVar

import numpy as np

from torchmars.core.check import Interval

Place = tuple[int, int]  # a part of a mixture, and one of its windows
AT_ONCE = 1024  # samples whose places are found by one call, or those of a step if they are more
Samples = TypeVar("Samples", int, np.ndarray)  # one, or an array of Python's integers


@dataclass(frozen=True)
class Shares:
    """Deals the samples of a run to the parts of its mixture by their weights.

    It needs no table. The first part takes sample i wherever floor((i + 1) p) > floor(i p), p being
    its share (Bresenham's line); the second takes, of the samples that are left, its share of what
    is left, and so on. So at every i each part has its share up to a few samples. Weights count
    as the decimal fractions that they are written as.
    """

    weights: list[Annotated[float, Interval(0, 1e9)]] = field(default_factory=lambda: [1.0])
    """Of each part. At least one is above 0."""
    start: Annotated[int, Interval(0, 2**63 - 1)] = 0
    """The first sample that these weights deal."""
    before: list[Annotated[int, Interval(0, 2**63 - 1)]] = field(default_factory=lambda: [0])
    """The samples of each part before that one."""

    def parts_of(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the parts that `samples` [n] are of, and their numbers among those of the parts.

        Samples are int64 and at least `start`, numbers uint64.
        """
        exact = samples.astype(object)  # products of samples and shares exceed 64 bits
        before, after = np.array(self.counts(exact)), np.array(self.counts(exact + 1))
        parts = (after > before).argmax(axis=0)
        return parts, before[parts, np.arange(len(parts))].astype(np.uint64)

    def counts(self, sample: Samples) -> list[Samples]:
        """Return how many samples of each part come before a sample, which is at least `start`."""
        left, result = sample - self.start, []
        for before, share in zip(self.before, self._shares):
            taken = left * share.numerator // share.denominator
            result.append(before + taken)
            left = left - taken
        return result

    def changed(self, weights: Sequence[float], sample: int) -> "Shares":
        """Return the shares of a run that resumes with `weights` from a sample.

        They are these themselves where no share changes.
        """
        if _exact(weights) == _exact(self.weights):
            return self
        return Shares(list(weights), sample, self.counts(sample))

    @cached_property
    def _shares(self) -> list[Fraction]:
        """Each part's share of the samples that the parts before it leave."""
        exact = _exact(self.weights)
        left = [sum(exact[part:], Fraction(0)) for part in range(len(exact))]
        return [weight / rest if rest else Fraction(0) for weight, rest in zip(exact, left)]


def shares_from_start(weights: Sequence[float]) -> Shares:
    """Return the shares of a run that begins with `weights`."""
    return Shares(list(weights), 0, [0] * len(weights))


def _exact(weights: Sequence[float]) -> list[Fraction]:
    """Return weights as fractions that add up to 1."""
    fractions = [Fraction(str(weight)) for weight in weights]
    total = sum(fractions)
    return [fraction / total for fraction in fractions]


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
    shares: Shares, lengths: Sequence[int], seed: int, samples: np.ndarray
) -> list[Place]:
    """Return the places that `samples` [n] read; `lengths` are the windows of each part."""
    parts, numbers = shares.parts_of(samples)
    for part in set(parts.tolist()):
        mine = parts == part
        numbers[mine] = windows_of(numbers[mine], lengths[part], seed)
    return list(zip(parts.tolist(), numbers.tolist()))


def rank_places(
    find: Callable[[np.ndarray], list[Place]], position: int, step: int, mine: range, size: int
) -> Iterator[list[Place]]:
    """Yield the places of a rank's microbatches of `size` samples, step after step, without end.

    They begin at global sample `position`. Of the next `step` samples the rank takes those in
    `mine`, and so on. `find` is `places_of` for a run.
    """
    steps = step * np.arange(-(-AT_ONCE // len(mine)))
    samples = np.add.outer(steps, mine).flatten()
    for first in itertools.count(position, step * len(steps)):
        places = find(first + samples)
        for begin in range(0, len(places), size):
            yield places[begin : begin + size]
