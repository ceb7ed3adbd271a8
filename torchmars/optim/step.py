"""The tensors of one step, group by group, and what its reduced sums make of them."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchmars.optim.kernels import KeepFactors, Tensors, keep_gradient_, run_kernel
from torchmars.optim.matrices import is_stack
from torchmars.optim.rules import RULES, MatrixRule, Rule
from torchmars.optim.rules.correction import Corrections
from torchmars.optim.settings import Settings
from torchmars.optim.tensors import flat_parts, local_gradient

State = dict[str, Tensor]  # of a parameter: "step" and the rule's buffers


class GroupTensors:
    """The parameters of one group and dtype that have a gradient, for one step.

    Lists run over `parameters`. The tensors in them are local and flat. `dtype` is that of the
    computation: at least float32. `stacks` says whether they are stacks of matrices, all of them.
    `wire` is the dtype in which matrices travel. Raises `ValueError` if the per-tensor clip was
    switched on after the state was made without a last gradient.
    """

    def __init__(
        self,
        rule: Rule,
        settings: Settings,
        parameters: list[Tensor],
        states: list[State],
        wire: torch.dtype,
    ) -> None:
        self.rule, self.settings, self.parameters = rule, settings, parameters
        self.stacks = is_stack(parameters[0].shape, settings["flatten"])
        self.dtype = torch.promote_types(parameters[0].dtype, torch.float32)
        self.weights = flat_parts(parameters)
        self.grads = flat_parts(map(local_gradient, parameters))
        self.steps = [state["step"] for state in states]
        self.buffers = {
            name: flat_parts(state[name] for state in states)
            for name in states[0]
            if name != "step"
        }
        self.momenta = next(iter(self.buffers.values()))
        self.last_grads = self.buffers.get("last_grad", [])
        if rule.variance_reduced and not self.last_grads and settings["clip"] is not None:
            raise ValueError(
                "clip cannot be switched on after the optimizer was created without it: "
                "no last gradient was kept"
            )
        # kappa, the strength of the correction; a first step has no correction.
        beta1, gamma = settings["betas"][0], settings["gamma"] if rule.variance_reduced else 0.0
        self.kappa = gamma * beta1 / (1 - beta1)
        self.largest_norm = self._largest_norm(wire)

    def _largest_norm(self, wire: torch.dtype) -> float:
        """Return the largest norm of a tensor's gradient, after the global clip, without overflow.

        No entry is larger than the norm. While h is no larger than g may be, a correction and all
        that leads to it stay below 2 (1 + kappa) ||g||.
        """
        momentum_scale = self.rule.momentum_scale(self.settings)
        limits = [_largest(self.parameters) / 2, _largest(self.momenta) / 2 * momentum_scale]
        if "exp_avg_sq" in self.buffers:
            limits.append(math.sqrt(_largest(self.buffers["exp_avg_sq"]) / 2))
        if isinstance(self.rule, MatrixRule):
            # A matrix travels as it is, and is divided by its norm where it arrives.
            wide = torch.promote_types(wire, torch.float32)
            limits += [torch.finfo(wire).max / 2, math.sqrt(torch.finfo(wide).max / 2)]
        most, clip = min(limits), self.settings["clip"]
        if self.last_grads and clip is not None and clip <= most:
            most = torch.finfo(self.dtype).max / 2  # the clip comes before any of these
        most /= 2 * (1 + self.kappa)
        return min(most, _largest(self.last_grads)) if self.last_grads else most

    def scalar(self, value: float | Tensor) -> Tensor:
        """Return `value` as a 0-d tensor in the dtype of the computation.

        It is on the CPU, also for parameters on a GPU: kernels take it as an argument, so nothing
        is copied or waited for.
        """
        return torch.as_tensor(value, dtype=self.dtype)

    def count_step(self, applied: Tensor) -> None:
        """Count one more step of each tensor, where it is `applied`."""
        torch._foreach_add_(self.steps, [applied.float()] * len(self.steps))


def _largest(tensors: Sequence[Tensor]) -> float:
    """Return the largest number of the tensors' dtype."""
    return torch.finfo(tensors[0].dtype).max


def gather_gradients(
    param_groups: Sequence[dict[str, Any]], state: Mapping[Tensor, State], wire: torch.dtype
) -> list[GroupTensors]:
    """Return the tensors of the parameters that have a gradient: of each group, by kind.

    Those of a kind have one dtype, gradients of one dtype, and state of the same names, and are
    stacks of matrices or not. `wire` is the dtype in which matrices travel.
    """
    result = []
    for group in param_groups:
        kinds: dict[Any, list[Tensor]] = {}
        for parameter in group["params"]:
            if parameter.grad is not None:
                stack = is_stack(parameter.shape, group["flatten"])
                kind = parameter.dtype, parameter.grad.dtype, stack, *state[parameter]
                kinds.setdefault(kind, []).append(parameter)
        for parameters in kinds.values():
            parameters.sort(key=lambda parameter: parameter.shape)  # as `run_kernel` likes them
            states = [state[parameter] for parameter in parameters]
            result.append(GroupTensors(RULES[group["rule"]], group, parameters, states, wire))
    return result


@dataclass(frozen=True)
class StepFactors:
    """What the reduced sums of a step make of one group. Factors are in its computation's dtype."""

    applied: Tensor
    """Whether the step is applied: the condition of each write. Where it is false nothing changes.
    0-d, bool."""
    scale: Tensor
    """The factor of the global clip, 0-d."""
    globally_clipped: bool
    """Whether there is a global clip."""
    products: Tensor
    """<g, g>, <g, h> and <h, h> of each whole tensor, [n, 3] in float64."""
    steps_made: Tensor
    """The steps that each tensor has made, [n] in float64."""
    corrections: Corrections | None
    """None if no last gradient is kept."""
    keep_apart: bool
    """Whether a kernel of its own makes the gradient just used the last one: `keep_gradients`."""
    compile: bool
    """Whether large tensors go through compiled kernels."""

    def run(self, kernel: Callable, tensors: Tensors, factors: tuple) -> None:
        """Run a rule's kernel on all tensors with their factors."""
        run_kernel(kernel, tensors, factors, self.compile)

    def keep_gradients(self, group: GroupTensors) -> None:
        """Make the gradients just used the last gradients, where the rule's kernel has not."""
        if self.keep_apart:
            pairs = list(zip(group.grads, group.last_grads))
            self.run(keep_gradient_, pairs, KeepFactors(self.scale, self.applied))
