"""An exponential moving average of a run's weights."""

from collections.abc import Mapping

import torch
from torch import Tensor

from torchmars.optim.tensors import local_part, unwrapped


class MovingAverage:
    """An exponential moving average of `weights`, by name, sharded as they are.

    After each step it is `decay` times itself and `1 - decay` times the weights (Polyak and
    Juditsky 1992, with exponential weights). It begins as the weights are.
    """

    @torch.no_grad()
    def __init__(self, weights: Mapping[str, Tensor], decay: float) -> None:
        self.decay = decay
        self.values = {name: unwrapped(weight).clone() for name, weight in weights.items()}
        """The average of each weight."""
        self._ours = [local_part(value) for value in self.values.values()]
        self._weights = [local_part(weight) for weight in weights.values()]

    @torch.no_grad()
    def begin(self) -> None:
        """Begin with the weights as they are now."""
        torch._foreach_copy_(self._ours, self._weights)

    @torch.no_grad()
    def update(self) -> None:
        """Take in the weights that a step has made, in one fused pass."""
        torch._foreach_lerp_(self._ours, self._weights, 1 - self.decay)
