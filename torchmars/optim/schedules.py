"""The learning rate, and values between two others, as pure functions of the step."""

import math
from typing import Literal


def lr_factor(
    step: int,
    total_steps: int,
    *,
    name: Literal["cosine", "linear", "constant", "wsd"] = "cosine",
    warmup_steps: int = 0,
    decay_steps: int | None = None,
    floor: float = 0.0,
    power: float = 1.0,
) -> float:
    """Return the factor of the peak learning rate for update number `step` = 1 ... total_steps.

    Args:
        step: number of the update, from 1.
        total_steps: updates of the run.
        name: cosine and linear fall to `floor` at `total_steps`. constant stays at 1. wsd stays at
            1 until a linear fall over the last `decay_steps` (Hu et al. 2024, arXiv 2404.06395).
        warmup_steps: over these it rises from 0 by a line: step / warmup_steps.
        decay_steps: of wsd, which raises `ValueError` without them.
        floor: the lowest learning rate over the peak.
        power: linear and wsd fall as 1 - t^power, t from 0 to 1: 1 is a line, 0.5 one minus the
            square root (Hägele et al. 2024, arXiv 2405.18392).
    """
    if step < warmup_steps:
        return step / warmup_steps
    if name != "wsd":
        return between(step - warmup_steps, total_steps - warmup_steps, 1.0, floor, name, power)
    if decay_steps is None:
        raise ValueError("the schedule wsd needs decay_steps")
    start = max(warmup_steps, total_steps - decay_steps)
    return between(step - start, total_steps - start, 1.0, floor, "linear", power)


def between(
    step: int,
    total_steps: int,
    first: float,
    last: float,
    name: Literal["cosine", "linear", "constant"],
    power: float = 1.0,
) -> float:
    """Return a value at `step` of a schedule from `first` at step 0 to `last` at `total_steps`.

    Args:
        step: from 0; beyond `total_steps` the value stays `last`.
        total_steps: the length of the schedule.
        first: the value at its start.
        last: the value at its end.
        name: linear, half a cosine, or constant, which stays `first`.
        power: linear goes by t^power, t from 0 to 1.
    """
    progress = min(max(step / max(total_steps, 1), 0.0), 1.0)
    if name == "constant":
        return first
    remaining = (1 + math.cos(math.pi * progress)) / 2 if name == "cosine" else 1 - progress**power
    return last + (first - last) * remaining
