"""The optimizer groups that follow from the roles of a model's parameters.

Source: the table "who gets which rule" of the MARS and MARS-M papers and their code (arXiv
2411.10438, 2510.21800).
"""

import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

from torchmars.optim.checks import check_group, check_module, check_rule, checked_params
from torchmars.optim.fused import cut_of, heads_of, softmax_router
from torchmars.optim.roles import ROLES, looks_like, roles, sized_as_tokens
from torchmars.optim.rules import RULES, MatrixRule, group_settings
from torchmars.optim.scaling import SettingFactors, TransferFactors
from torchmars.optim.settings import CUT, Settings, shown

NO_FACTORS = SettingFactors()


def complete_settings(name: str, **given: Any) -> Settings:
    """Return the settings of optimizer `name`: its defaults, with those `given` in their place.

    Raises `ValueError`, naming the argument, for an unknown name, a setting that the optimizer does
    not have and a value out of range. A `clip` of 0 or None switches the per-tensor clip off.
    """
    if not isinstance(name, str) or name not in RULES:
        raise ValueError(f"name must be one of {', '.join(RULES)}, got {shown(name)!r}")
    known = {each.name: each for each in RULES[name].settings if each.scope != "group"}
    for key in given:
        if key not in known:
            raise ValueError(f'{key} has no meaning for "{name}": remove it')
    settings = {key: setting.default for key, setting in known.items()} | given
    for key, setting in known.items():
        setting.check(_clip(settings[key]) if key == "clip" else settings[key])
    if "lr_1d" in settings and settings["lr_1d"] is None:
        settings["lr_1d"] = settings["lr"] / 2
    return settings


def role_settings(name: str, **settings: Any) -> dict[str, Settings]:
    """Return the group settings of each role under optimizer `name`.

    `settings` are given as `complete_settings` takes them.
    """
    settings, rule = complete_settings(name, **settings), RULES[name]
    shared = [each.name for each in rule.settings if each.scope == "both"]
    main = {"rule": name, "clip": None} | {key: settings[key] for key in shared}
    main["clip"] = _clip(main["clip"])
    table = dict.fromkeys(ROLES, main) | rule.settings_by_role(main, settings)
    table["convolution"] = table["convolution"] | {"flatten": True}
    return table


def _clip(value: Any) -> Any:
    """Return a clip as a group has it: None for 0."""
    return None if isinstance(value, int | float) and not value else value


def check_groups(
    name: str,
    *,
    by_role: dict[str, dict[str, Any]],
    by_pattern: Sequence[tuple[str, dict[str, Any]]],
    **settings: Any,
) -> None:
    """Raise the `ValueError` that `param_groups` would raise with a model that has every role."""
    table = role_settings(name, **settings)
    for role, changes in by_role.items():
        table[role] = _changed(table[role], changes, role)
    for pattern, changes in by_pattern:
        if not pattern:
            raise ValueError("groups needs a pattern in each of its tables")
        _changed(table["matrix"], changes, pattern)


def param_groups(
    model: nn.Module,
    name: str = "mars-adamw",
    *,
    by_role: dict[str, dict[str, Any]] | None = None,
    by_pattern: Sequence[tuple[str, dict[str, Any]]] = (),
    split_fused: bool = True,
    factors: TransferFactors | None = None,
    **settings: Any,
) -> list[dict[str, Any]]:
    """Return groups for `MARS`, with named parameters, each in one group.

    There is one group for each pattern and each role that `model` has, for each way in which a
    parameter of them is cut into matrices, and for different `factors`.

    Args:
        model: the model whose parameters are grouped by their roles (see `roles`).
        name: the optimizer whose defaults are used: one of the rules.
        by_role: for a role, group settings that replace the optimizer's: rule, lr, betas, eps,
            weight_decay, gamma, clip, split, flatten, transposed, per_head, zero_mean.
        by_pattern: pairs (pattern, group settings). A parameter whose name matches a pattern (as a
            shell's) goes to the first one that it matches, with its role's settings except those
            given.
        split_fused: take apart, for the matrix rules, what its name or type says to be several
            matrices in one: `qkv`, `gate_up_proj`, gates of recurrent layers, groups of
            convolutions. Other fused weights need a `split` in `by_pattern`. False: all stay whole.
        factors: the result of `transfer_factors`, whose base all settings are then for.
        settings: replace the defaults of optimizer `name`. For `per_head` see `fused.heads_of`.

    Raises `ValueError`, naming the argument, for a value out of range, for a setting without
    meaning and for a pattern that claims no parameter.
    """
    _check_types(model, by_pattern, factors)
    given = by_role or {}
    table = _changed_roles(role_settings(name, **settings), given)
    groups: dict[tuple[str, str, str], dict[str, Any]] = {}
    claimed = set[str]()
    named, modules = dict(model.named_parameters()), dict(model.named_modules())
    heads = {each: found for each in named if (found := heads_of(each, modules))}
    by_name = roles(model)
    for parameter_name, role in by_name.items():
        pattern, changes = _claim(parameter_name, by_pattern)
        claimed.add(pattern)
        where = pattern or role
        changed = _changed(table[role], changes, where)
        parameter, own = named[parameter_name], given.get(role, {}) | changes
        orthogonal = isinstance(RULES[changed["rule"]], MatrixRule)
        may_cut = parameter.ndim > 1 and (split_fused or not orthogonal)
        cut = cut_of(parameter_name, parameter, modules) if may_cut else {}
        cut = {each: value for each, value in cut.items() if each not in own}
        if (per_head := changed.pop("per_head", False)) and orthogonal:
            cut |= _of_heads(parameter_name, heads, per_head, own, model)
        of = factors.of(parameter_name, parameter, role, changed, cut) if factors else NO_FACTORS
        if orthogonal:
            changed |= cut | _zero_mean(parameter_name, role, own, modules)
        _put((parameter_name, parameter), groups, (where, role), changed, of)
    _check_claimed(by_pattern, claimed)
    if isinstance(RULES[table["matrix"]["rule"]], MatrixRule):
        _warn_of_unclear(model, by_name, by_pattern)
    return list(groups.values())


def _warn_of_unclear(
    model: nn.Module, by_name: Mapping[str, str], by_pattern: Sequence[tuple[str, Settings]]
) -> None:
    """Warn of matrices that may be the head or a table of tokens, unless a pattern claims one."""
    names: list[str] = sum(sized_as_tokens(model, by_name), [])
    if names and not any(_claim(name, by_pattern)[0] for name in names):
        warnings.warn(
            f"{', '.join(names[:3])} have as many rows as the table of tokens, and one of them may "
            "be the head: all are orthogonalised. If one is, write "
            f'by_pattern=[("{names[-1]}", {{"rule": "adamw"}})], with its name',
            stacklevel=3,
        )


def _claim(name: str, by_pattern: Sequence[tuple[str, Settings]]) -> tuple[str, Settings]:
    """Return the pattern that claims a parameter, and its settings; without one "" and none."""
    return next((each for each in by_pattern if fnmatchcase(name, each[0])), ("", {}))


def _of_heads(
    name: str, heads: Mapping[str, Settings], per_head: Any, own: Settings, model: nn.Module
) -> Settings:
    """Return the settings that cut a parameter into heads, where `per_head` says so.

    `heads` has them by name. A split among the parameter's `own` settings goes before "auto".
    Raises `ValueError` where `per_head` is True and no parameter has heads.
    """
    if per_head is True and not heads:
        raise ValueError(
            f"per_head has no meaning for a {type(model).__name__}, whose attention declares no "
            "heads (head_rows): remove it"
        )
    apart = per_head is True or (per_head == "auto" and "split" not in own)
    return heads.get(name, {}) if apart else {}


def _put(
    named: tuple[str, Tensor],
    groups: dict[tuple[str, str, str], dict[str, Any]],
    place: tuple[str, str],
    settings: Settings,
    factors: SettingFactors,
) -> None:
    """Put a parameter into the group of those at its `place` with its settings and factors."""
    differ = [*(settings.get(name) for name in (*CUT, "zero_mean")), str(factors)]
    group = {"params": [], "role": place[0]} | factors.of(settings)
    groups.setdefault((*place, repr(differ)), group)["params"].append(named)


def _zero_mean(name: str, role: str, own: Settings, modules: Mapping[str, nn.Module]) -> Settings:
    """Return the setting `zero_mean` of a softmax router whose `own` settings do not say it."""
    found = role == "router" and "zero_mean" not in own and softmax_router(name, modules)
    return {"zero_mean": True} if found else {}


def _changed_roles(
    table: dict[str, Settings], by_role: dict[str, dict[str, Any]]
) -> dict[str, Settings]:
    """Return the settings of each role with those changed that `by_role` changes."""
    for role in by_role:
        if role not in ROLES:
            raise ValueError(f"by_role must name roles of {', '.join(ROLES)}, got {role!r}")
    return table | {role: _changed(table[role], each, role) for role, each in by_role.items()}


def _check_types(model: Any, by_pattern: Any, factors: Any) -> None:
    """Raise `TypeError` for an argument of `param_groups` of another type."""
    if not isinstance(factors, TransferFactors | None):
        raise TypeError(f"factors must be of transfer_factors, got a {type(factors).__name__}")
    check_module(model, "model")
    if not isinstance(by_pattern, list | tuple) or not all(
        isinstance(each, list | tuple) and len(each) == 2 and isinstance(each[1], dict)
        for each in by_pattern
    ):
        raise TypeError("by_pattern must be a list of pairs (pattern, dict of settings)")


def _check_claimed(by_pattern: Sequence[tuple[str, Any]], claimed: Collection[str]) -> None:
    """Raise `ValueError` for a pattern that claimed no parameter."""
    for pattern, _ in by_pattern:
        if pattern not in claimed:
            raise ValueError(
                f"by_pattern: {pattern!r} claims no parameter "
                "(or an earlier pattern claimed them all)"
            )


def _changed(group: dict[str, Any], changes: dict[str, Any], where: str) -> dict[str, Any]:
    """Return a group's settings with `changes`, checked. `where` names the group in errors."""
    changed, known = group | changes, group_settings()
    for key, value in changes.items():
        if key not in ("rule", *known):
            raise ValueError(
                f"{where}.{key} is no setting of a group: those are rule, {', '.join(known)}"
            )
        shared = key in known and known[key].scope == "both"
        if shared and value is not None and not _has_meaning(key, changed["rule"]):
            raise ValueError(f'{where}.{key} has no meaning for "{changed["rule"]}": remove it')
    if "clip" in changed:
        changed["clip"] = _clip(changed["clip"])
    if changed.get("per_head") is True and "split" in changed:
        raise ValueError(
            f"{where}.split does not go with per_head, which splits by heads: remove it, or set "
            "per_head = false beside it"
        )
    try:
        check_rule(changed["rule"])
        for key in known.keys() & changed.keys():
            known[key].check(changed[key])
    except ValueError as error:
        raise ValueError(f"{where}.{error}") from None
    return changed


def _has_meaning(key: str, rule: Any) -> bool:
    """Return whether a group of `rule` has a use for a setting."""
    found = RULES.get(rule)
    # Unknown rules and settings are refused elsewhere.
    return found is None or key not in group_settings() or key in found.defaults


def complete_group(
    param_group: dict[str, Any], defaults: dict[str, Any], given: Collection[str], number: int
) -> dict[str, Any]:
    """Return a copy of a user's group, checked, with its rule's defaults.

    `defaults` are the optimizer's; those `given` go before the rule's. `number` is the group's
    among the optimizer's groups. Other keys are kept, as schedules and wrappers need them. Raises
    `ValueError` for a value out of range and for a parameter that the group has twice.
    """
    group = dict(param_group)
    if "params" not in group:
        raise ValueError(f"group {number} has no 'params': name its parameters")
    check_rule(group.get("rule", defaults["rule"]))
    for setting in RULES[group.get("rule", defaults["rule"])].settings:
        if setting.scope != "optimizer" and setting.name not in given:
            group.setdefault(setting.name, setting.default)
    if (defaults | group).get("per_head") == "auto":  # `param_groups` has asked the model
        group["per_head"] = False
    check_group(defaults | group, number)
    group["params"] = checked_params(group["params"])
    if isinstance(group["params"], list):
        parameters = [each[1] if isinstance(each, tuple) else each for each in group["params"]]
        if len(set(parameters)) < len(parameters):
            raise ValueError(f"group {number} has one parameter twice: name it once")
    return group


def warn_of_embeddings(groups: Iterable[dict[str, Any]], given: Iterable[Any]) -> None:
    """Warn, once, where `groups` that nobody sorted leave an embedding or a head to a matrix rule.

    `given` are the user's values for each group: those that name a rule or a role were sorted. Of
    parameters without names nobody knows which they are.
    """
    for group, each in zip(groups, given):
        is_sorted = isinstance(each, dict) and {"rule", "role"} & set(each)
        if is_sorted or not isinstance(RULES[group["rule"]], MatrixRule):
            continue
        names = group.get("param_names", ())
        found = next((repr(name) for name in names if looks_like(name)), None)
        if found or not names:
            rule = group["rule"]
            warnings.warn(
                f"MARS(rule={rule!r}) orthogonalises {found or 'parameters without names'}: that "
                "is wrong for embeddings and heads. "
                f"MARS(param_groups(model, {rule!r})) gives them their own rule",
                stacklevel=3,
            )
            return
