"""The parameters of a step by kind, and their rules' factors from settings."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchmars.optim.matrices.shapes import is_stack
from torchmars.optim.rules import RULES
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
        self, param_groups: Sequence[dict[str, Any]], state: Mapping[Tensor, State]
    ) -> list[GroupTensors]:
        """Return the tensors of a step.

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
            _tensors_of(param_groups[number], parameters, [state[each] for each in parameters])
            for number, parameters in self.sorted
        ]


def _tensors_of(settings: Settings, parameters: list[Tensor], states: list[State]) -> GroupTensors:
    """Return parameters of one kind as the tensors of a step."""
    rule = RULES[settings["rule"]]
    if rule.variance_reduced and "last_grad" not in states[0] and settings["clip"] is not None:
        raise ValueError(
            "clip cannot be switched on after the optimizer was created without it: "
            "no last gradient was kept"
        )
    beta1, gamma = settings["betas"][0], settings["gamma"] if rule.variance_reduced else 0.0
    return GroupTensors(settings, parameters, states, gamma * beta1 / (1 - beta1))


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
