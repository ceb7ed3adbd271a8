"""Exact mode: the last gradients of the next step, taken before it."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from torchmars.optim.passes import write_if
from torchmars.optim.reduction import Reduction
from torchmars.optim.rules.rule import SQUARED_NORM, GroupTensors, State
from torchmars.optim.tensors import flat, local_part


class LookAhead:
    """The gradients of the next step's batch at today's weights, and their squared norms.

    Of parameters that have `add`ed their state. `taken`: they are those of the step to come.
    """

    def __init__(self) -> None:
        self.last_grads: dict[Tensor, Tensor] = {}
        self.squared_norms: dict[Tensor, Tensor] = {}
        self.taken = False

    @property
    def tensors(self) -> list[Tensor]:
        """All that is kept."""
        return [*self.last_grads.values(), *self.squared_norms.values()]

    def add(self, state: Mapping[Tensor, State]) -> None:
        """Make room for the parameters of `state` that keep a last gradient."""
        for parameter, each in state.items():
            if "last_grad" in each:
                self.last_grads[parameter] = torch.zeros_like(each["last_grad"])
                self.squared_norms[parameter] = torch.zeros_like(each[SQUARED_NORM])

    def take(self, groups: Sequence[GroupTensors], reduction: Reduction) -> None:
        """Take the gradients of `groups` after the global clip; zeros where there is none."""
        gradients = {
            parameter: gradient
            for group in groups
            for parameter, gradient in zip(group.parameters, group.grads)
        }
        for parameter, target in self.last_grads.items():
            if parameter not in gradients:
                target.zero_()
                continue
            gradient = gradients[parameter]
            used = gradient * reduction.scale.to(gradient.dtype)
            # Where one is broken none of them counts, since their norm is unknown.
            used = torch.where(reduction.ok, used, math.nan)
            write_if(None, flat(local_part(target)), used)
        norms = list(self.squared_norms.values())
        if norms:
            used = reduction.used_squared_norms(self.squared_norms)
            used = torch.where(reduction.ok, used, math.nan)
            torch._foreach_copy_(norms, list(used.unbind()))
        self.taken = True

    def swap(self, state: Mapping[Tensor, State]) -> None:
        """Make what was taken the last gradients of `state`, whose memory is then free again."""
        for parameter in self.last_grads:
            for key, ahead in (
                ("last_grad", self.last_grads),
                (SQUARED_NORM, self.squared_norms),
            ):
                each = state[parameter]
                each[key], ahead[parameter] = ahead[parameter], each[key]
        self.taken = False
