"""The learning rate as a pure function of the step."""

import math
from typing import Literal


def lr_factor(step: int, total_steps: int, *, name: Literal["cosine", "linear", "constant", "wsd"] = "cosine",
              warmup_steps: int = 0, decay_steps: int | None = None, floor: float = 0.0) -> float:
    """The factor in [floor, 1] that multiplies the peak learning rate for update number `step` = 1 ... total_steps.

    Warmup is linear from 0: step / warmup_steps. Then cosine and linear fall to `floor` (the lowest learning rate over
    the peak) at `total_steps`, constant stays at 1, and wsd stays at 1 until a linear fall over the last `decay_steps`.
    """
    if step < warmup_steps:
        return step / warmup_steps
    if name == "constant":
        return 1.0
    start = max(warmup_steps, total_steps - decay_steps) if name == "wsd" else warmup_steps
    progress = min(max((step - start) / max(total_steps - start, 1), 0.0), 1.0)
    remaining = (1 + math.cos(math.pi * progress)) / 2 if name == "cosine" else 1 - progress
    return floor + (1 - floor) * remaining
