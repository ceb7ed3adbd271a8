"""Learning rate and gamma as pure functions of the step."""

import math
from typing import Literal


def lr_factor(
    step: int,
    total_steps: int,
    *,
    name: Literal["cosine", "linear", "constant", "wsd", "range_test"] = "cosine",
    warmup_steps: int = 0,
    decay_steps: int | None = None,
    floor: float = 0.0,
) -> float:
    """Return the factor of the peak learning rate for update number `step` = 1 ... total_steps.

    Warmup is linear from 0: step / warmup_steps. After it, cosine and linear fall to `floor` (the
    lowest learning rate over the peak) at `total_steps`. constant stays at 1. wsd stays at 1 until
    a linear fall over the last `decay_steps`; it raises `ValueError` without them. range_test rises
    from `floor` by the same factor at each step, for a learning rate range test (Smith 2017,
    arXiv 1506.01186).
    """
    if step < warmup_steps:
        return step / warmup_steps
    if name == "range_test":
        return floor ** ((total_steps - step) / max(total_steps - 1, 1))
    if name != "wsd":
        return between(step - warmup_steps, total_steps - warmup_steps, 1.0, floor, name)
    if decay_steps is None:
        raise ValueError("the schedule wsd needs decay_steps")
    start = max(warmup_steps, total_steps - decay_steps)
    return between(step - start, total_steps - start, 1.0, floor, "linear")


def between(
    step: int,
    total_steps: int,
    first: float,
    last: float,
    name: Literal["cosine", "linear", "constant"],
) -> float:
    """Return a value at `step` of a schedule from `first` at step 0 to `last` at `total_steps`.

    It follows a line or half a cosine. With constant it stays `first`.
    """
    progress = min(max(step / max(total_steps, 1), 0.0), 1.0)
    if name == "constant":
        return first
    remaining = (1 + math.cos(math.pi * progress)) / 2 if name == "cosine" else 1 - progress
    return last + (first - last) * remaining
