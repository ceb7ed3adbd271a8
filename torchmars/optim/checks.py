"""Checks of an optimizer's arguments: hyperparameters and parameters."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from torchmars.optim.rules import RULES, MatrixRule, group_settings
from torchmars.optim.settings import Number, shown
from torchmars.optim.tensors import local_part

MAX_GRAD_NORM = Number("max_grad_norm", positive=True, optional=True)


def check_rule(value: Any, suffix: str = "") -> None:
    """Raise `ValueError` unless `value` names a rule."""
    if not (isinstance(value, str) and value in RULES):
        raise ValueError(f"rule{suffix} must be one of {', '.join(RULES)}, got {shown(value)}")


def check_group(group: Mapping[str, Any], number: int) -> None:
    """Raise `ValueError` for a setting of group `number` that is out of its range, naming it."""
    check_rule(group["rule"], f" of group {number}")
    for name, setting in group_settings().items():
        if name in group:
            setting.check(group[name], f" of group {number}")
    if group.get("per_head") and group.get("split") == 1:
        raise ValueError(
            f"per_head of group {number} needs the model, which declares its heads: use "
            "param_groups(model, per_head=True)"
        )


def checked_params(params: Any) -> Any:
    """Return parameters, or groups of them, to be read more than once.

    Raises `TypeError` for what cannot be read. torch refuses others, and takes a tensor as a group.
    """
    if isinstance(params, nn.Module) or not isinstance(params, Iterable):
        raise TypeError(
            "params must be parameters, named parameters or groups of them, such as "
            f"param_groups(model), got {'the module ' * isinstance(params, nn.Module)}"
            f"{type(params).__name__}"
        )
    return params if isinstance(params, Tensor | set) else list(params)


def check_state_dtype(name: str, dtype: Any) -> None:
    """Raise `ValueError` for a dtype that `MARS` cannot keep state in: torch computes in no 8 bits.

    None is the parameter's own. `name` is the argument's.
    """
    good = isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize > 1
    if dtype is not None and not good:
        raise ValueError(
            f"{name} must be a floating-point dtype, got {dtype!r}: torch.bfloat16 is one"
        )


def parameter_name(group: dict[str, Any], group_number: int, place: int) -> str:
    """Return a parameter's name in messages: its place in the groups, and its name if any."""
    names = group.get("param_names")
    where = f"{place} of group {group_number}"
    return f"parameter {names[place]!r} ({where})" if names else f"parameter {where}"


def check_parameters(group: dict[str, Any], number: int) -> None:
    """Raise `ValueError` for a parameter that the rule of group `number` cannot update."""
    rule, of_matrices = group["rule"], isinstance(RULES[group["rule"]], MatrixRule)
    for place, parameter in enumerate(group["params"]):
        name, local = parameter_name(group, number, place), local_part(parameter)
        # FSDP1's mark on its FlatParameter, and on the views of it that use_orig_params=True shows:
        # private, torch 2.11 to 2.15.
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
        if of_matrices and parameter.ndim < 2:
            raise ValueError(
                f"a matrix rule needs parameters of at least two dimensions, {name} has "
                f"shape {tuple(parameter.shape)}: MARS(param_groups(model, {rule!r})) gives "
                "norms and biases, embeddings and heads their own rule"
            )
        dense = torch.empty_like(local).stride() == local.stride()
        if not (local.is_contiguous() if of_matrices else dense):
            wanted = "contiguous for a matrix rule" if of_matrices else "dense in memory"
            raise ValueError(f"params must be {wanted}, {name} has strides {local.stride()}")
