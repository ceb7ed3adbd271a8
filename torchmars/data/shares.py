"""Which part of a mixture each sample is read from, by the weights of the parts."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from typing import Annotated, TypeVar

import numpy as np

from torchmars.core.check import Range

Samples = TypeVar("Samples", int, np.ndarray)  # one, or an array of Python's integers


@dataclass(frozen=True)
class Shares:
    """Deals the samples of a run to the parts of its mixture by their weights.

    It needs no table. The first part takes sample i wherever floor((i + 1) p) > floor(i p), p being
    its share (Bresenham's line); the second takes, of the samples that are left, its share of what
    is left, and so on. So at every i each part has its share up to a few samples. Weights count
    as the decimal fractions that they are written as.
    """

    weights: list[Annotated[float, Range(0, 1e9)]] = field(default_factory=lambda: [1.0])
    """Of each part. At least one is above 0."""
    start: Annotated[int, Range(0, 2**63 - 1)] = 0
    """The first sample that these weights deal."""
    before: list[Annotated[int, Range(0, 2**63 - 1)]] = field(default_factory=lambda: [0])
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
