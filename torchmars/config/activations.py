"""Which activations the forward pass keeps for the backward pass, and which are recomputed."""

from dataclasses import dataclass
from typing import Annotated, Literal

from torchmars.config.fields import Positive, require
from torchmars.core.bounds import Range


@dataclass(frozen=True)
class ActivationCheckpointConfig:
    """Which activations of each block are recomputed in the backward pass, instead of kept: less
    memory, more work, the same gradients."""

    mode: Literal["none", "full", "selective", "memory_budget"] = "none"
    """none: keep all. full: keep what enters a block only, and compute the rest again. selective:
    keep the results of matrix products and of attention too, and what ranks of tp and cp got from
    each other by reduce-scatters and all-to-alls. memory_budget: let torch.compile choose what to
    keep."""
    every: Positive = 1
    """full, selective: only every such block does so, counted from the first one. The others keep
    all."""
    memory_budget: Annotated[float, Range(0, 1)] = 0.5
    """memory_budget: the share to keep. 1 is what torch.compile keeps anyway, 0 is as full."""

    def check(self) -> None:
        """Raise `UserError` for an option that the mode does not take."""
        require(
            self.every == 1 or self.mode in ("full", "selective"),
            f'activation_checkpoint.every has no meaning for activation_checkpoint.mode = "'
            f'{self.mode}": set the mode to "full" or "selective"',
        )
