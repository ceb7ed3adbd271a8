"""What watches the loss while a run trains."""

import math
import statistics
from collections import deque

from torchmars.config import GuardsConfig

WINDOW = 64  # losses to compare with
FEWEST = 16  # losses that make a comparison worth something


class SpikeGuard:
    """Tells a loss that stands out: more than `spike_sigmas` standard deviations above the mean of the last 64 that did not.

    `recent` is all of its state.
    """

    def __init__(self, config: GuardsConfig) -> None:
        self.active, self.sigmas = config.loss_spike != "off", config.spike_sigmas
        self.recent: deque[float] = deque(maxlen=WINDOW)

    def stands_out(self, loss: float) -> bool:
        """Whether `loss`, the global batch's, stands out; if not, it counts among the recent ones. One that is not finite does neither:
        the optimizer skips it."""
        if not math.isfinite(loss):
            return False
        if len(self.recent) >= FEWEST and loss > statistics.fmean(
            self.recent
        ) + self.sigmas * statistics.stdev(self.recent):
            return True
        self.recent.append(loss)
        return False
