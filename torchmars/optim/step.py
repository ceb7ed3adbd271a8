"""The tensors of one step, group by group, and what its reduced sums make of them."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from torchmars.optim.kernels import KeepFactors, Tensors, keep_gradient_, run_kernel
from torchmars.optim.matrices.shapes import is_stack
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
        self.states = states
        self.names = [name for name in states[0] if name != "step"]
        self.stacks = is_stack(parameters[0].shape, settings["flatten"])
        self.dtype = torch.promote_types(parameters[0].dtype, torch.float32)
        self.corrects = "last_grad" in self.names
        if rule.variance_reduced and not self.corrects and settings["clip"] is not None:
            raise ValueError(
                "clip cannot be switched on after the optimizer was created without it: "
                "no last gradient was kept"
            )
        # kappa, the strength of the correction; a first step has no correction.
        beta1, gamma = settings["betas"][0], settings["gamma"] if rule.variance_reduced else 0.0
        self.kappa = gamma * beta1 / (1 - beta1)
        self.largest_norm = self._largest_norm(wire)

    @property
    def role(self) -> str:
        """The role of the group, or its rule where it has none."""
        return self.settings.get("role", self.rule.name)

    @cached_property
    def weights(self) -> list[Tensor]:
        """The parameters."""
        return flat_parts(self.parameters)

    @cached_property
    def grads(self) -> list[Tensor]:
        """Their gradients."""
        return flat_parts(map(local_gradient, self.parameters))

    @cached_property
    def steps(self) -> list[Tensor]:
        """The steps that each was updated in, 0-d."""
        return [state["step"] for state in self.states]

    @cached_property
    def buffers(self) -> dict[str, list[Tensor]]:
        """The state, by name."""
        return {name: flat_parts(state[name] for state in self.states) for name in self.names}

    @property
    def momenta(self) -> list[Tensor]:
        """The first of the buffers."""
        return self.buffers[self.names[0]]

    @property
    def last_grads(self) -> list[Tensor]:
        """The last gradients; empty if none are kept."""
        return self.buffers.get("last_grad", [])

    def _largest_norm(self, wire: torch.dtype) -> float:
        """Return the largest norm of a tensor's gradient, after the global clip, without overflow.

        No entry is larger than the norm. While h is no larger than g may be, a correction and all
        that leads to it stay below 2 (1 + kappa) ||g||.
        """
        momentum_scale, state = self.rule.momentum_scale(self.settings), self.states[0]
        limits = [_largest(self.parameters[0]) / 2]
        limits.append(_largest(state[self.names[0]]) / 2 * momentum_scale)
        if "exp_avg_sq" in state:
            limits.append(math.sqrt(_largest(state["exp_avg_sq"]) / 2))
        if isinstance(self.rule, MatrixRule):
            # A matrix travels as it is, and is divided by its norm where it arrives.
            wide = torch.promote_types(wire, torch.float32)
            limits += [torch.finfo(wire).max / 2, math.sqrt(torch.finfo(wide).max / 2)]
        most, clip = min(limits), self.settings["clip"]
        if self.corrects and clip is not None and clip <= most:
            most = torch.finfo(self.dtype).max / 2  # the clip comes before any of these
        most /= 2 * (1 + self.kappa)
        return min(most, _largest(state["last_grad"])) if self.corrects else most

    def scalar(self, value: float | Tensor) -> Tensor:
        """Return `value` as a 0-d tensor in the dtype of the computation.

        It is on the CPU, also for parameters on a GPU: kernels take it as an argument, so nothing
        is copied or waited for.
        """
        return torch.as_tensor(value, dtype=self.dtype)

    def count_step(self, applied: Tensor) -> None:
        """Count one more step of each tensor, where it is `applied`."""
        torch._foreach_add_(self.steps, [applied.float()] * len(self.steps))


def _largest(tensor: Tensor) -> float:
    """Return the largest number of the tensor's dtype."""
    return torch.finfo(tensor.dtype).max


class Kinds:
    """The parameters of each group that have a gradient, by kind.

    Those of a kind have one dtype, gradients of one dtype, and state of the same names, and are
    stacks of matrices or not. They are sorted anew where other parameters have a gradient.
    """

    def __init__(self) -> None:
        self._dtypes: list[torch.dtype | None] | None = None  # of the gradients
        self.sorted: list[tuple[int, list[Tensor]]] = []
        """Those of a kind with the number of their group: another list where it changed."""

    def gather(
        self,
        param_groups: Sequence[dict[str, Any]],
        state: Mapping[Tensor, State],
        wire: torch.dtype,
    ) -> list[GroupTensors]:
        """Return the tensors of a step. `wire` is the dtype in which matrices travel."""
        dtypes = [
            None if (gradient := parameter.grad) is None else gradient.dtype
            for group in param_groups
            for parameter in group["params"]
        ]
        if dtypes != self._dtypes:
            self._dtypes, self.sorted = dtypes, list(_by_kind(param_groups, state))
        return [
            GroupTensors(
                RULES[param_groups[number]["rule"]],
                param_groups[number],
                parameters,
                [state[parameter] for parameter in parameters],
                wire,
            )
            for number, parameters in self.sorted
        ]


def _by_kind(
    param_groups: Sequence[dict[str, Any]], state: Mapping[Tensor, State]
) -> Iterator[tuple[int, list[Tensor]]]:
    """Yield the parameters of each kind, with the number of their group."""
    for number, group in enumerate(param_groups):
        kinds: dict[Any, list[Tensor]] = {}
        for parameter in group["params"]:
            if parameter.grad is not None:
                stack = is_stack(parameter.shape, group["flatten"])
                kind = parameter.dtype, parameter.grad.dtype, stack, *state[parameter]
                kinds.setdefault(kind, []).append(parameter)
        for parameters in kinds.values():
            parameters.sort(key=lambda parameter: parameter.shape)  # as `run_kernel` likes them
            yield number, parameters


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
