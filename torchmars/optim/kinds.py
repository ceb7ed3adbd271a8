"""The parameters of a step by kind, and their rules' factors from settings."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchmars.optim.matrices.shapes import is_stack
from torchmars.optim.rules import RULES, MatrixRule
from torchmars.optim.settings import Settings
from torchmars.optim.step import GroupTensors, State


class Kinds:
    """The parameters of each group that have a gradient, by kind.

    Parameters of a kind have one dtype, gradients of one dtype, and state of the same names, and
    are stacks of matrices or not. They are sorted again where other parameters have a gradient.
    """

    def __init__(self) -> None:
        self._dtypes: list[torch.dtype | None] | None = None  # of the gradients
        self.sorted: list[tuple[int, list[Tensor]]] = []
        """The parameters of a kind with the number of their group: another list if it changed."""

    def gather(
        self,
        param_groups: Sequence[dict[str, Any]],
        state: Mapping[Tensor, State],
        wire: torch.dtype,
    ) -> list[GroupTensors]:
        """Return the tensors of a step. `wire` is the dtype in which matrices travel.

        Raises `ValueError` if the per-tensor clip was switched on after the state was made
        without a last gradient.
        """
        dtypes = [
            None if (gradient := parameter.grad) is None else gradient.dtype
            for group in param_groups
            for parameter in group["params"]
        ]
        if dtypes != self._dtypes:
            self._dtypes, self.sorted = dtypes, list(_by_kind(param_groups, state))
        return [
            _tensors_of(
                param_groups[number], parameters, [state[each] for each in parameters], wire
            )
            for number, parameters in self.sorted
        ]


def _tensors_of(
    settings: Settings, parameters: list[Tensor], states: list[State], wire: torch.dtype
) -> GroupTensors:
    """Return parameters of one kind as the tensors of a step."""
    rule = RULES[settings["rule"]]
    if rule.variance_reduced and "last_grad" not in states[0] and settings["clip"] is not None:
        raise ValueError(
            "clip cannot be switched on after the optimizer was created without it: "
            "no last gradient was kept"
        )
    beta1, gamma = settings["betas"][0], settings["gamma"] if rule.variance_reduced else 0.0
    kappa = gamma * beta1 / (1 - beta1)
    largest_norm = _largest_norm(settings, parameters[0], states[0], kappa, wire)
    return GroupTensors(settings, parameters, states, kappa, largest_norm)


def _largest_norm(
    settings: Settings, parameter: Tensor, state: State, kappa: float, wire: torch.dtype
) -> float:
    """Return the largest norm of a tensor's gradient, after the global clip, without overflow.

    No entry is larger than the norm. While h is no larger than g may be, a correction and all
    that leads to it stay below 2 (1 + kappa) ||g||.
    """
    rule, momentum = RULES[settings["rule"]], next(name for name in state if name != "step")
    limits = [_largest(parameter) / 2]
    limits.append(_largest(state[momentum]) / 2 * rule.momentum_scale(settings))
    if "exp_avg_sq" in state:
        limits.append(math.sqrt(_largest(state["exp_avg_sq"]) / 2))
    if isinstance(rule, MatrixRule):
        # A matrix travels as it is, and is divided by its norm where it arrives.
        wide = torch.promote_types(wire, torch.float32)
        limits += [torch.finfo(wire).max / 2, math.sqrt(torch.finfo(wide).max / 2)]
    most, clip, corrects = min(limits), settings["clip"], "last_grad" in state
    if corrects and clip is not None and clip <= most:
        # The clip comes before any of these.
        most = torch.finfo(torch.promote_types(parameter.dtype, torch.float32)).max / 2
    most /= 2 * (1 + kappa)
    return min(most, _largest(state["last_grad"])) if corrects else most


def _largest(tensor: Tensor) -> float:
    """Return the largest number of the tensor's dtype."""
    return torch.finfo(tensor.dtype).max


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
