"""The factors of a kernel: its arguments besides tensors.

They are a tuple. In it, a tensor of one dim has a number for each of the kernel's tensors. A 0-d
tensor, or what is no tensor, is the same for all of them.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

Factors = TypeVar("Factors", bound=tuple | None)


def split_factors(factors: Factors, counts: Sequence[int]) -> list[Factors]:
    """Return the factors of the first tensors, the next ones, ...: as many as `counts` says."""
    return _cut(factors, lambda values: values.split(counts), len(counts))


def factors_of_each(factors: Factors, count: int) -> list[Factors]:
    """Return the factors of each of `count` tensors, 0-d."""
    return _cut(factors, lambda values: values.unbind(), count)


def _cut(factors: Any, cut: Callable[[Any], Sequence[Any]], count: int) -> list[Any]:
    """Return `count` tuples like `factors`, each with one part of the factors that differ."""
    if isinstance(factors, tuple):
        columns = [_cut(each, cut, count) for each in factors]
        make = getattr(factors, "_make", tuple)
        return [make(row) for row in zip(*columns)]
    return list(cut(factors)) if getattr(factors, "ndim", 0) else [factors] * count
