"""Checks of what an optimizer is given: hyperparameters and parameters."""

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchmars.optim.rules import RULES
from torchmars.optim.rules.matrix import MatrixRule
from torchmars.optim.tensors import local_part

SETTINGS = (
    *("rule", "lr", "betas", "eps", "weight_decay", "gamma", "gamma_next", "clip"),
    *("flatten", "split"),
)
"""The settings of a group."""


def check_group(group: Mapping[str, Any], number: int) -> None:
    """Raise `ValueError` for a setting of group `number` that is out of its range, naming it."""
    check_hyperparameters(f" of group {number}", **{key: group[key] for key in SETTINGS})


def check_hyperparameters(suffix: str = "", **values: Any) -> None:
    """Raise `ValueError` for a hyperparameter out of its range, naming it (with `suffix`).

    Known are rule, lr, eps (> 0), weight_decay, gamma, gamma_next (>= 0), betas (two numbers in
    [0, 1)), clip and max_grad_norm (> 0 or None), flatten (a bool) and split (parts or their rows).
    """
    for name, value in values.items():
        try:
            good, wanted = _in_range(name, value)
        except (TypeError, ValueError, RuntimeError, OverflowError):  # not one number
            good, wanted = False, "numbers" if name == "betas" else "a number"
        if not good:
            raise ValueError(f"{name}{suffix} must be {wanted}, got {shown(value)}")


def shown(value: Any) -> str:
    """Return a value as a line of a message can show it."""
    return " ".join(str(value).split())[:80]


def _in_range(name: str, value: Any) -> tuple[bool, str]:
    """Return whether a hyperparameter is good, and what it should be."""
    if name == "rule":
        return isinstance(value, str) and value in RULES, f"one of {', '.join(RULES)}"
    if name == "flatten":
        return isinstance(value, bool), "true or false"
    if name == "split":
        parts = value if isinstance(value, tuple | list) and value else [value]
        good = all(isinstance(each, int) and not isinstance(each, bool) for each in parts)
        return good and min(parts) >= 1, "a whole number of at least 1, or several: rows"
    if name == "betas":
        return len(value) == 2 and all(0 <= beta < 1 for beta in value), "two numbers in [0, 1)"
    if value is None and name in ("clip", "max_grad_norm", "gamma_next"):
        return True, ""
    if isinstance(value, Tensor) and value.device.type != "cpu":  # nobody waits for it
        return value.numel() == 1, "one number"
    number = float(value + 0)  # a text is none
    if name == "eps":
        return number > 0, "more than 0"
    if name in ("clip", "max_grad_norm"):
        return number > 0, "more than 0, or None for no clip"
    return 0 <= number < math.inf, "at least 0"


def check_flags(exact: Any, overlap: Any, compile: Any, norm_group: Any) -> None:
    """Raise `TypeError` for an argument of `MARS` that is of another type, naming it."""
    for name, value in {"exact": exact, "overlap": overlap, "compile": compile}.items():
        if not isinstance(value, bool) and not (name == "compile" and value is None):
            raise TypeError(f"{name} must be True or False, got {shown(value)!r}")
    if norm_group is not None and not isinstance(norm_group, dist.ProcessGroup):
        raise TypeError(
            f"norm_group must be a process group that this rank is in, got {shown(norm_group)!r}"
        )


def check_state_dtypes(
    momentum_dtype: torch.dtype | None, last_grad_dtype: torch.dtype | None
) -> None:
    """Raise `ValueError` for dtypes that `MARS` cannot keep its state in, naming them."""
    dtypes = {"momentum_dtype": momentum_dtype, "last_grad_dtype": last_grad_dtype}
    for name, dtype in dtypes.items():
        if dtype is not None and not _computes(dtype):
            raise ValueError(
                f"{name} must be a floating-point dtype, got {dtype!r}: torch.bfloat16 is one"
            )


def _computes(dtype: Any) -> bool:
    """Return whether torch computes with `dtype`, as it does not with those of 8 bits."""
    return isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize > 1


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
