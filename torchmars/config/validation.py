"""The held-out loss, and the sample at the end."""

from dataclasses import dataclass

from torchmars.config.fields import Count, Positive


@dataclass(frozen=True)
class ValidationConfig:
    """The held-out loss, always over the same windows of the validation split."""

    interval: Count = 100
    """Steps between validations, and one at the end. 0: never."""
    windows: Positive = 64
    """Sequences of training.seq_len tokens, spread evenly over the split."""
    sample_tokens: Count = 0
    """Tokens of text to sample when the run is complete. 0: none."""
    sample_prompt: str = "\n"
    """Text that the sample continues."""
