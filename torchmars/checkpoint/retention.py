"""Which checkpoints of a run are kept."""

import math

from torchmars.config import CheckpointConfig


def steps_to_delete(
    steps: list[int], losses: dict[int, float], config: CheckpointConfig
) -> list[int]:
    """Return those of `steps` whose checkpoints `config` does not keep.

    `losses` are the validation losses that are known, by step.
    """
    kept = set(sorted(steps)[-config.keep_last :])  # all of them for 0
    if config.keep_every:
        kept |= {step for step in steps if step % config.keep_every == 0}
    losses = {step: loss for step, loss in losses.items() if math.isfinite(loss)}
    if config.keep_best and losses:
        kept.add(min(losses, key=lambda step: (losses[step], step)))
    return sorted(set(steps) - kept)
