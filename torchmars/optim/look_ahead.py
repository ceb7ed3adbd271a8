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

    With a `fraction` below 1 they are those of a part S of the batch. The correction is then that
    of S, kappa s (g_S - h_S), where s is the factor of the global clip of the whole gradient g.
    `subtract` makes of h_S the difference h_S - g_S, so that it takes no memory of its own.
    """

    def __init__(self, fraction: float = 1.0) -> None:
        self.fraction = fraction
        self.last_grads: dict[Tensor, Tensor] = {}
        self.taken = False
        self.subtracted = fraction == 1
        """Whether the last gradients of the step to come are ready."""

    def add(self, state: Mapping[Tensor, State]) -> None:
        """Make room for the parameters of `state` that keep a last gradient."""
        for parameter, each in state.items():
            if "last_grad" in each:
                self.last_grads[parameter] = torch.zeros_like(each["last_grad"])

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
            # Where one is broken none of them is used, since their norm is unknown.
            (values,) = flat_parts([target])
            values.copy_(torch.where(reduction.applied, used, math.nan))
        # Not of the step before: it may have been given up after its part was subtracted.
        self.taken, self.subtracted = True, self.fraction == 1

    def subtract(self, groups: Sequence[GroupTensors]) -> None:
        """Subtract the gradients of S at today's weights from its last gradients.

        Those of `groups` are a sum over S that was divided by the size of the whole batch.
        """
        for group in groups:
            if group.last_grads:
                wide = [gradient.to(group.dtype) for gradient in group.grads]
                torch._foreach_add_(group.last_grads, wide, alpha=-1 / self.fraction)
        self.subtracted = True

    def swap(self, state: Mapping[Tensor, State]) -> None:
        """Make what was taken the last gradients of `state`, whose memory is then free again."""
        for parameter, ahead in self.last_grads.items():
            self.last_grads[parameter] = state[parameter]["last_grad"]
            state[parameter]["last_grad"] = ahead
        self.taken, self.subtracted = False, self.fraction == 1
