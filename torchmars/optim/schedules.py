"""The learning rate, as a pure function of the step."""

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
    if name == "constant":
        return 1.0
    start = warmup_steps
    if name == "wsd":
        if decay_steps is None:
            raise ValueError("the schedule wsd needs decay_steps")
        start = max(warmup_steps, total_steps - decay_steps)
    t = min(max((step - start) / max(total_steps - start, 1), 0.0), 1.0)
    remaining = (1 + math.cos(math.pi * t)) / 2 if name == "cosine" else 1 - t**power
    return floor + (1 - floor) * remaining
