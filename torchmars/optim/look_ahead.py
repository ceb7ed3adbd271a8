"""Exact mode: the last gradients of the next step, taken before it."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from torchmars.optim.reduction import Reduction
from torchmars.optim.step import GroupTensors, State
from torchmars.optim.tensors import flat_parts


class LookAhead:
    """The gradients of the next step's batch at today's weights.

    Of parameters that have `add`ed their state. `taken`: they are those of the step to come.
    """

    def __init__(self) -> None:
        self.last_grads: dict[Tensor, Tensor] = {}
        self.taken = False

    def add(self, state: Mapping[Tensor, State]) -> None:
        """Make room for the parameters of `state` that keep a last gradient."""
        for parameter, each in state.items():
            if "last_grad" in each:
                self.last_grads[parameter] = torch.zeros_like(each["last_grad"])

    def take(self, groups: Sequence[GroupTensors], reduction: Reduction) -> None:
        """Take the gradients of `groups` after the global clip; zeros if there is none."""
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
            # Where one is broken none of them is used, since their norm is unknown.
            (values,) = flat_parts([target])
            values.copy_(torch.where(reduction.applied, used, math.nan))
        self.taken = True

    def swap(self, state: Mapping[Tensor, State]) -> None:
        """Make the taken gradients the last gradients of `state`, and free their memory."""
        for parameter, ahead in self.last_grads.items():
            self.last_grads[parameter] = state[parameter]["last_grad"]
            state[parameter]["last_grad"] = ahead
        self.taken = False
