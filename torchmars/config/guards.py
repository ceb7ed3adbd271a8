"""Guards of a run while it trains."""

from dataclasses import dataclass
from typing import Annotated, Literal

from torchmars.config.fields import Amount
from torchmars.core.bounds import Range


@dataclass(frozen=True)
class GuardsConfig:
    """Guards of a run while it trains. A gradient that is not finite always skips its step."""

    loss_spike: Literal["off", "skip"] = "off"
    """The reaction to a batch whose loss is an outlier. skip: leave its step out, for which ranks
    wait for the loss at every step."""
    spike_sigmas: Annotated[float, Range(0, 1_000_000, open_low=True)] = 6.0
    """Standard deviations above the mean of the last 64 losses, from which a loss is an outlier."""
    hang_seconds: Amount = 600.0
    """Seconds without a step after which a rank is taken to hang. Every rank then says where it
    stands, and the run ends. Must be more than the longest step, compilation, validation or save. 0
    disables it. The backend's timeouts still apply: 30 minutes; 10 in HSDP on GPUs."""
