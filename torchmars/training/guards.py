"""Guards that watch the loss and the gradients while a run trains."""

import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping

from torchmars.config import GuardsConfig
from torchmars.core.errors import UserError

RECENT_LOSSES = 64  # losses that a new one is compared with
FEWEST_LOSSES = 16  # that make a comparison worth something
MAX_SKIPPED_IN_A_ROW = 10


def recent(losses: Iterable[float] = ()) -> deque[float]:
    """Return the last of `losses`, as many as a new one is compared with."""
    return deque(losses, maxlen=RECENT_LOSSES)


class LossGuard:
    """Finds an outlier among losses, and ends a run that does not recover."""

    def __init__(self, config: GuardsConfig) -> None:
        self.active, self.sigmas = config.loss_spike == "skip", config.spike_sigmas

    def check(self, loss: float, recent: deque[float]) -> bool:
        """Return whether the global batch's `loss` is an outlier; if not, add it to `recent`.

        An outlier is more than `spike_sigmas` standard deviations above their mean. A loss that is
        not finite is neither an outlier nor added: the optimizer skips its step.
        """
        if not math.isfinite(loss):
            return False
        if len(recent) >= FEWEST_LOSSES:
            if loss > statistics.fmean(recent) + self.sigmas * statistics.stdev(recent):
                return True
        recent.append(loss)
        return False

    def check_skipped(self, telemetry: Mapping[str, float], step: int) -> None:
        """Raise `UserError` if every one of the last steps up to `step` was skipped."""
        in_a_row = telemetry["skipped_in_a_row"]
        if in_a_row >= MAX_SKIPPED_IN_A_ROW:
            spikes = ", or their losses were outliers (guards.spike_sigmas)" if self.active else ""
            raise UserError(
                f"the last {in_a_row:.0f} steps up to {step} were skipped, since their gradients "
                f"were not finite{spikes}: lower optimizer.lr, or go "
                "on from the newest checkpoint with another setting"
            )
