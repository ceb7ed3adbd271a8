"""Which activations the forward pass keeps for the backward pass, and which are recomputed."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ActivationCheckpointConfig:
    """Which activations of each block are recomputed in the backward pass, instead of kept: less
    memory, more work, the same gradients."""

    mode: Literal["none", "full", "selective"] = "none"
    """none: keep all. full: keep what enters a block only, and compute the rest again. selective:
    keep the results of matrix products and of attention too, and what ranks of tp and cp got from
    each other by reduce-scatters and all-to-alls."""
