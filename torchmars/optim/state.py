"""Each parameter's state: its layout, how it follows its parameter, how a saved one is loaded."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from torchmars.optim.checks import check_group, parameter_name
from torchmars.optim.matrices.shapes import is_stack
from torchmars.optim.rules import RULES, state_fits
from torchmars.optim.settings import FIXED
from torchmars.optim.step import State
from torchmars.optim.tensors import Known, layout_of, local_intervals, local_part

NewState = Callable[[Tensor, dict[str, Any]], State]  # of a parameter and its group
# Hyperparameters of torch's AdamW that mean nothing here. A schedule's own are carried.
OF_TORCH = "amsgrad maximize foreach capturable differentiable fused decoupled_weight_decay".split()


def new_state(
    parameter: Tensor,
    group: dict[str, Any],
    exact: bool,
    momentum_dtype: torch.dtype | None,
    last_grad_dtype: torch.dtype | None,
) -> State:
    """Return a parameter's state before the first step. For `exact` and the dtypes see `MARS`."""
    # The count lies beside the parameter: kernels read it there, and the host never needs it.
    device = local_part(parameter).device
    stacks = is_stack(parameter.shape, group["flatten"])
    names = RULES[group["rule"]].buffers(group["clip"], exact, stacks)
    dtypes = {names[0]: momentum_dtype, "last_grad": last_grad_dtype}
    state = {"step": torch.zeros((), dtype=torch.float32, device=device)}
    for name in names:
        state[name] = torch.zeros_like(parameter, dtype=dtypes.get(name)).detach()
    return state


def carried_state(
    groups: Sequence[dict[str, Any]], known: Known, state: dict[Tensor, State], new_state: NewState
) -> dict[Tensor, State]:
    """Return the state of the parameters of `groups`, which were `known` before.

    A parameter has the place in its group of the one that it replaced, which is in no group any
    more. Its state has the same values in its own layout, as that of one that was moved. Raises
    `ValueError` if a parameter was replaced by one of another shape. Changes nothing.
    """
    present = {parameter for group in groups for parameter in group["params"]}
    before = {parameter: layout for group in known for parameter, layout in group.items()}
    carried: dict[Tensor, State] = {}
    for number, group in enumerate(groups):
        former = [*known[number]] if number < len(known) else []
        replaced = former if len(former) == len(group["params"]) else group["params"]
        for place, (parameter, old) in enumerate(zip(group["params"], replaced)):
            if parameter in before or old in present:
                old = parameter
            if old is parameter and before.get(old) == layout_of(old):
                carried[parameter] = state[old]
                continue
            fresh = carried[parameter] = new_state(parameter, group)
            if old not in before:
                continue
            shape, *_ = before[old]
            if parameter.shape != shape:
                raise ValueError(
                    f"{parameter_name(group, number, place)} has shape "
                    f"{tuple(parameter.shape)} now, and its state {tuple(shape)}: "
                    "it can be replaced by a tensor of its own shape only"
                )
            for key in fresh.keys() & state[old].keys():
                fill(fresh[key], state[old][key])
    return carried


def fill(target: Tensor, source: Tensor) -> None:
    """Copy a whole tensor's values to one of another device, dtype, layout or sharding.

    Collective if `source` is sharded otherwise than `target`.
    """
    if source.is_meta:  # no values yet
        return
    if isinstance(source, DTensor) and isinstance(target, DTensor):
        if (source.device_mesh, source.placements) == (target.device_mesh, target.placements):
            local_part(target).copy_(local_part(source))
            return
    whole = source.full_tensor() if isinstance(source, DTensor) else source
    whole = whole[tuple(slice(*interval) for interval in local_intervals(target))]
    local_part(target).copy_(whole)


def check_loaded(
    saved: dict[str, Any], groups: Sequence[dict[str, Any]], new_state: NewState
) -> tuple[list[dict[str, Any]], dict[Tensor, State], list[Tensor]]:
    """Return groups and state after loading `saved`, a `state_dict`, into `groups`.

    And the parameters whose rule keeps a last gradient, which the saved state has not. The state of
    torch's AdamW, whose groups name no rule, is that of the rule "adamw". It and that rule's fit
    "mars-adamw" too, which then keeps its own hyperparameters. Raises `ValueError` naming the
    parameter, the key and the shapes where something does not fit. Changes nothing.
    """
    if not {"state", "param_groups"} <= set(saved):
        raise ValueError(f"state_dict must have 'state' and 'param_groups', got {sorted(saved)}")
    saved_groups = saved["param_groups"]
    if len(saved_groups) != len(groups):
        raise ValueError(
            f"state_dict has {len(saved_groups)} parameter groups, this optimizer {len(groups)}"
        )
    merged: list[dict[str, Any]] = []
    state: dict[Tensor, State] = {}
    without_last_grad = []
    for number, (theirs, ours) in enumerate(zip(saved_groups, groups)):
        counts = len(theirs["params"]), len(ours["params"])
        if counts[0] != counts[1]:
            raise ValueError(
                f"group {number} has {counts[0]} parameters in the state_dict, {counts[1]} in this "
                "optimizer"
            )
        merged.append(_merged(theirs, ours, number))
        for place, (key, parameter) in enumerate(zip(theirs["params"], ours["params"])):
            fresh = state[parameter] = new_state(parameter, ours)
            entries = saved["state"].get(key, {})
            # torch's AdamW has no state for parameters without a gradient so far.
            if entries or "rule" in theirs:
                name = parameter_name(ours, number, place)
                _fill_checked(fresh, entries, theirs, ours["rule"], name)
                if fresh.keys() - entries.keys():
                    without_last_grad.append(parameter)
    return merged, state, without_last_grad


def _merged(theirs: dict[str, Any], ours: dict[str, Any], number: int) -> dict[str, Any]:
    """Return the hyperparameters of a group after loading."""
    rule, saved_rule = ours["rule"], theirs.get("rule", "adamw")
    if rule != saved_rule and saved_rule not in RULES[rule].continues:
        raise ValueError(
            f"group {number} of the state_dict is of the rule {saved_rule}, here it is of {rule}"
        )
    for key in ("amsgrad", "maximize"):
        if "rule" not in theirs and theirs.get(key):
            raise ValueError(
                f"group {number} of the state_dict has {key}=True, which {rule} has not"
            )
    merged = dict(ours)
    if rule == saved_rule:
        saved = {key: each for key, each in theirs.items() if key not in OF_TORCH}
        check_group(ours | saved, number)
        merged |= {key: value for key, value in saved.items() if key not in FIXED}
    return merged | {"params": theirs["params"]}


def _fill_checked(
    fresh: State, entries: dict[str, Any], theirs: dict[str, Any], rule: str, name: str
) -> None:
    """Copy a parameter's saved state to a `fresh` one. Raises unless keys and shapes fit."""
    saved_rule = theirs.get("rule", "adamw")
    if entries.keys() - fresh.keys() or not state_fits(rule, fresh, saved_rule, entries):
        raise ValueError(
            f"{name} has the state {', '.join(sorted(entries)) or 'none'} in the "
            f"state_dict, {rule} needs {', '.join(sorted(fresh))}"
        )
    for key, value in entries.items():
        value = torch.as_tensor(value)
        if value.shape != fresh[key].shape:
            raise ValueError(
                f"{name}: {key} has shape {tuple(value.shape)} in the state_dict, "
                f"here {tuple(fresh[key].shape)}"
            )
        if value.is_meta and not fresh[key].is_meta:
            raise ValueError(f"{name}: {key} is on the meta device in the state_dict: no values")
        fill(fresh[key], value)
