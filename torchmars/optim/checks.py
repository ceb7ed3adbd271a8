"""Checks of what an optimizer is given: hyperparameters and parameters."""

from typing import Any

import torch
from torch import Tensor

from torchmars.optim.rules import RULES
from torchmars.optim.rules.matrix import MatrixRule
from torchmars.optim.tensors import local_part


def check_hyperparameters(suffix: str = "", **values: Any) -> None:
    """Raise `ValueError` for a hyperparameter out of its range, naming it (with `suffix`).

    Known are rule, lr, eps (> 0), weight_decay, gamma, gamma_next (>= 0), betas (two numbers in
    [0, 1)), clip and max_grad_norm (> 0 or None).
    """
    for name, value in values.items():
        try:
            good, wanted = _in_range(name, value)
        except TypeError:  # no number at all
            good, wanted = False, "numbers" if name == "betas" else "a number"
        if not good:
            raise ValueError(f"{name}{suffix} must be {wanted}, got {value}")


def _in_range(name: str, value: Any) -> tuple[bool, str]:
    """Return whether a hyperparameter is good, and what it should be."""
    if name == "rule":
        return value in RULES, f"one of {', '.join(RULES)}"
    if name == "betas":
        return len(value) == 2 and all(0 <= beta < 1 for beta in value), "two numbers in [0, 1)"
    if name == "eps":
        return value > 0, "more than 0"
    if name in ("clip", "max_grad_norm"):
        return value is None or value > 0, "more than 0, or None for no clip"
    return value is None and name == "gamma_next" or 0 <= value < float("inf"), "at least 0"


def check_state_dtypes(
    momentum_dtype: torch.dtype | None, last_grad_dtype: torch.dtype | None
) -> None:
    """Raise `ValueError` for dtypes that `MARS` cannot keep its state in, naming them."""
    dtypes = {"momentum_dtype": momentum_dtype, "last_grad_dtype": last_grad_dtype}
    for name, dtype in dtypes.items():
        if dtype is not None and not dtype.is_floating_point:
            raise ValueError(f"{name} must be a floating-point dtype, got {dtype}")


def check_parameters(group: dict[str, Any], number: int) -> None:
    """Raise `ValueError` for a parameter that the rule of `group` cannot update.

    `number` is the group's among its groups.
    """
    for place, parameter in enumerate(group["params"]):
        name = parameter_name(group, number, place)
        _check_parameter(parameter, local_part(parameter), group["rule"], name)


def parameter_name(group: dict[str, Any], group_number: int, place: int) -> str:
    """Return what messages call a parameter: its place in the groups, and its name if any."""
    names = group.get("param_names")
    where = f"{place} of group {group_number}"
    return f"parameter {names[place]!r} ({where})" if names else f"parameter {where}"


def _check_parameter(parameter: Tensor, local: Tensor, rule: str, name: str) -> None:
    """Raise `ValueError` for a parameter that `rule` cannot update.

    `local` is this rank's part of it, `name` what the message calls it.
    """
    # FSDP1's mark on its FlatParameter, and on the views of it that use_orig_params=True shows:
    # private, torch 2.11 to 2.13.
    if getattr(parameter, "_fsdp_flattened", False):
        raise ValueError(
            f"params must be whole tensors or DTensors, {name} is a flattened part of "
            "FSDP1 (FullyShardedDataParallel), whose norms cannot be known: "
            "use FSDP2, torch.distributed.fsdp.fully_shard"
        )
    if not parameter.is_floating_point():
        raise ValueError(
            f"params must be real floating-point tensors, {name} is of {parameter.dtype}"
        )
    if isinstance(RULES[rule], MatrixRule) and parameter.ndim < 2:
        raise ValueError(
            f"a matrix rule needs parameters of at least two dimensions, {name} has "
            f"shape {tuple(parameter.shape)}: MARS(param_groups(model, {rule!r})) gives "
            "norms and biases, embeddings and heads their own rule"
        )
    if isinstance(RULES[rule], MatrixRule) and not local.is_contiguous():
        raise ValueError(
            f"params of a matrix rule must be contiguous, {name} has strides {local.stride()}"
        )
    if torch.empty_like(local).stride() != local.stride():
        raise ValueError(f"params must be dense in memory, {name} has strides {local.stride()}")
