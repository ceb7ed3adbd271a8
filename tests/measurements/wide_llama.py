"""A plugin: Llama that begins with values of 0.08, which suit 32 dims as 0.02 suit 512."""

from torchmars.config.model import MODELS
from torchmars.models.llama import Llama


class WideLlama(Llama):
    """Llama with four times the standard deviation of initial values."""

    multipliers = Llama.multipliers

    def init_std(self, name: str) -> float | None:
        """Return it, None for ones."""
        std = super().init_std(name)
        return None if std is None else 4 * std


MODELS["wide-llama"] = "tests.measurements.wide_llama.WideLlama"
