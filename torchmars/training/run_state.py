"""How far a run is: what a checkpoint keeps of it beside the tensors."""

from collections import deque
from dataclasses import dataclass, field

from torchmars.data.mixture import Shares
from torchmars.training.guards import recent


@dataclass
class RunState:
    """The state of a run after a step. It is the same on every rank."""

    step: int = 0
    """Optimizer steps made."""
    position: int = 0
    """Samples of the global data order consumed."""
    validation_loss: float | None = None
    """The validation loss at this step, if it was measured."""
    recent_losses: deque[float] = field(default_factory=recent)
    """Losses of the last steps without outliers, oldest first."""
    shares: Shares = field(default_factory=Shares)
    """What deals the samples to the parts of the mixture."""
