"""Each parameter's state: its layout, how it follows its parameter, how a saved one is loaded."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
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


# Keys of the groups of torch's own AdamW that mean nothing here.
_TORCH_KEYS = (
    "amsgrad",
    "maximize",
    "foreach",
    "capturable",
    "differentiable",
    "fused",
    "decoupled_weight_decay",
)


def new_state(
    parameter: Tensor,
    group: dict[str, Any],
    exact: bool,
    momentum_dtype: torch.dtype | None,
    last_grad_dtype: torch.dtype | None,
) -> State:
    """Return the state of a parameter of `group` before the first step.

    For `exact` and the dtypes see `MARS`.
    """
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

    A parameter whose layout changed gets a state of its new layout with the same values. Raises
    `ValueError` if a parameter was replaced by one of another shape. Changes nothing.
    """
    before = {parameter: layout for group in known for parameter, layout in group}
    former = _predecessors(groups, known)
    carried: dict[Tensor, State] = {}
    for group in groups:
        for parameter in group["params"]:
            old = former.get(parameter)
            if old is None:
                carried[parameter] = new_state(parameter, group)
            elif old is parameter and layout_of(old) == before[old]:
                carried[parameter] = state[old]
            else:
                carried[parameter] = new_state(parameter, group)
                for key in carried[parameter].keys() & state[old].keys():
                    fill(carried[parameter][key], state[old][key])
    return carried


def _predecessors(groups: Sequence[dict[str, Any]], known: Known) -> dict[Tensor, Tensor]:
    """Return for each parameter the one whose state it takes over: itself, or the one it replaced.

    A parameter replaced the one at its place of its group, if that one is in no group any more.
    Others are new and left out.
    """
    present = {parameter for group in groups for parameter in group["params"]}
    before = {parameter: layout for group in known for parameter, layout in group}
    result = {}
    for number, group in enumerate(groups):
        old = known[number] if number < len(known) else []
        for place, parameter in enumerate(group["params"]):
            if parameter in before:
                former = parameter
            elif len(old) == len(group["params"]) and old[place][0] not in present:
                former = old[place][0]
            else:
                continue
            shape = before[former].shape
            if parameter.shape != shape:
                raise ValueError(
                    f"{parameter_name(group, number, place)} has shape "
                    f"{tuple(parameter.shape)} now, and its state {tuple(shape)}: "
                    "it can be replaced by a tensor of its own shape only"
                )
            result[parameter] = former
    return result


def fill(target: Tensor, source: Tensor) -> None:
    """Copy a whole tensor's values to one of another device, dtype, layout or sharding.

    Collective if `source` is sharded otherwise than `target`.
    """
    if source.is_meta:  # no values yet
        return
    if _lie_alike(source, target):
        local_part(target).copy_(local_part(source))
        return
    whole = source.full_tensor() if isinstance(source, DTensor) else source
    whole = whole[tuple(slice(*interval) for interval in local_intervals(target))]
    local_part(target).copy_(whole)


def _lie_alike(one: Tensor, other: Tensor) -> bool:
    """Return whether two DTensors have their shards on the same ranks."""
    return (
        isinstance(one, DTensor)
        and isinstance(other, DTensor)
        and (one.device_mesh, one.placements) == (other.device_mesh, other.placements)
    )


@dataclass
class Loaded:
    """A saved state that fits: the optimizer's groups and state after loading it."""

    groups: list[dict[str, Any]]
    """The saved param_groups. Settings that they lack are as in the optimizer's own."""
    state: dict[Tensor, State]
    without_last_grad: list[Tensor]
    """Parameters whose rule keeps a last gradient, which the saved state has not."""


def check_loaded(
    saved: dict[str, Any], groups: Sequence[dict[str, Any]], new_state: NewState
) -> Loaded:
    """Return the result of loading `saved`, a `state_dict`, into an optimizer with `groups`.

    The state of torch's AdamW, whose groups name no rule, is that of the rule "adamw". It and that
    rule's fit "mars-adamw" too, which then keeps its own hyperparameters. Raises `ValueError`
    naming the parameter, the key and the shapes where something does not fit. Changes nothing.
    """
    if not {"state", "param_groups"} <= set(saved):
        raise ValueError(f"state_dict must have 'state' and 'param_groups', got {sorted(saved)}")
    saved_groups = saved["param_groups"]
    if len(saved_groups) != len(groups):
        raise ValueError(
            f"state_dict has {len(saved_groups)} parameter groups, this optimizer {len(groups)}"
        )
    loaded = Loaded([], {}, [])
    for number, (theirs, ours) in enumerate(zip(saved_groups, groups)):
        if len(theirs["params"]) != len(ours["params"]):
            raise ValueError(
                f"group {number} has {len(theirs['params'])} parameters in the "
                f"state_dict, {len(ours['params'])} in this optimizer"
            )
        loaded.groups.append(_merged(theirs, ours, number))
        for place, (key, parameter) in enumerate(zip(theirs["params"], ours["params"])):
            name = parameter_name(ours, number, place)
            entries = saved["state"].get(key, {})
            fresh = loaded.state[parameter] = new_state(parameter, ours)
            # torch's AdamW has no state for parameters without a gradient so far.
            if entries or "rule" in theirs:
                current = _checked_state(entries, theirs, ours["rule"], fresh, name)
                if "last_grad" in fresh.keys() - current.keys():
                    loaded.without_last_grad.append(parameter)
                for each in fresh.keys() & current.keys():
                    fill(fresh[each], current[each])
    return loaded


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
        saved = {key: value for key, value in theirs.items() if key not in _TORCH_KEYS}
        check_group(ours | saved, number)
        merged |= {key: value for key, value in saved.items() if key not in FIXED}
    return merged | {"params": theirs["params"]}


def _checked_state(
    entries: dict[str, Any], theirs: dict[str, Any], rule: str, wanted: State, name: str
) -> State:
    """Return a parameter's saved state, as tensors. Raises unless keys and shapes are `wanted`."""
    saved_rule = theirs.get("rule", "adamw")
    current = {key: torch.as_tensor(value) for key, value in entries.items()}
    if current.keys() - wanted.keys() or not state_fits(rule, wanted, saved_rule, current):
        raise ValueError(
            f"{name} has the state {', '.join(sorted(entries)) or 'none'} in the "
            f"state_dict, {rule} needs {', '.join(sorted(wanted))}"
        )
    for key, value in current.items():
        if value.shape != wanted[key].shape:
            raise ValueError(
                f"{name}: {key} has shape {tuple(value.shape)} in the state_dict, "
                f"here {tuple(wanted[key].shape)}"
            )
        if value.is_meta and not wanted[key].is_meta:
            raise ValueError(f"{name}: {key} is on the meta device in the state_dict: no values")
    return current
