"""How far a run is: what a checkpoint keeps of it beside the tensors."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

RECENT_LOSSES = 64  # losses that a new one is compared with


def recent(losses: Iterable[float] = ()) -> deque[float]:
    """Return the last of `losses`, as many as are compared with."""
    return deque(losses, maxlen=RECENT_LOSSES)


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
    """Losses of the last steps that did not stand out, oldest first."""
