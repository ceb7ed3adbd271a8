"""The optimizer groups that follow from the roles of a model's parameters."""

import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

from torchmars.optim.checks import check_group, check_rule, checked_params
from torchmars.optim.roles import (
    ROLES,
    cut_of,
    heads_of,
    looks_outer,
    roles,
    sized_as_tokens,
    softmax_router,
)
from torchmars.optim.rules import RULES, MatrixRule, group_settings
from torchmars.optim.scaling import TransferFactors
from torchmars.optim.settings import CUT, Settings, shown


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
    table = _table(name, by_role, settings)
    for pattern, changes in by_pattern:
        if not pattern:
            raise ValueError("groups needs a pattern in each of its tables")
        _changed(table["matrix"], changes, pattern)


def _table(
    name: str, by_role: Mapping[str, dict[str, Any]], settings: Settings
) -> dict[str, Settings]:
    """Return the settings of each role under optimizer `name`, changed as `by_role` says."""
    settings, rule = complete_settings(name, **settings), RULES[name]
    shared = [each.name for each in rule.settings if each.scope == "both"]
    main = {"rule": name, "clip": None} | {key: settings[key] for key in shared}
    main["clip"] = _clip(main["clip"])
    table = dict.fromkeys(ROLES, main) | rule.settings_by_role(main, settings)
    table["convolution"] = table["convolution"] | {"flatten": True}
    for role, changes in by_role.items():
        if role not in table:
            raise ValueError(f"by_role must name roles of {', '.join(ROLES)}, got {role!r}")
        table[role] = _changed(table[role], changes, role)
    return table


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
        settings: replace the defaults of optimizer `name`. For `per_head` see `roles.heads_of`.

    Raises `ValueError`, naming the argument, for a value out of range, for a setting without
    meaning and for a pattern that claims no parameter.
    """
    given = by_role or {}
    table = _table(name, given, settings)
    groups: dict[tuple[str, ...], dict[str, Any]] = {}
    named, modules = dict(model.named_parameters()), dict(model.named_modules())
    by_name, by_pattern = roles(model), list(by_pattern)
    for parameter_name, role in by_name.items():
        pattern, changes = _claim(parameter_name, by_pattern)
        where, own = pattern or role, given.get(role, {}) | changes
        changed = _changed(table[role], changes, where)
        cut = _cut(parameter_name, named, modules, changed, own, split_fused)
        changed.pop("per_head", None)
        if factors is not None:
            changed = factors.of(parameter_name, named[parameter_name], role, changed, cut)
        if isinstance(RULES[changed["rule"]], MatrixRule):
            changed |= cut
            if role == "router" and softmax_router(parameter_name, modules):
                changed.setdefault("zero_mean", True)
        # Factors of one group may differ by rounding.
        rates = (f"{float(changed.get(each, 0)):.9g}" for each in ("lr", "weight_decay", "eps"))
        key = where, role, *(str(changed.get(each)) for each in (*CUT, "zero_mean")), *rates
        group = groups.setdefault(key, {"params": [], "role": where} | changed)
        group["params"].append((parameter_name, named[parameter_name]))
    _check_claimed(by_name, by_pattern)
    if isinstance(RULES[table["matrix"]["rule"]], MatrixRule):
        _warn_of_unclear(model, by_name, by_pattern)
    return list(groups.values())


def _cut(
    name: str,
    named: Mapping[str, Tensor],
    modules: Mapping[str, nn.Module],
    settings: Settings,
    own: Settings,
    split_fused: bool,
) -> Settings:
    """Return how a parameter is cut into matrices, but for what its `own` settings say of that.

    `settings` are those of its group. Raises `ValueError` where `per_head` is True and no parameter
    has heads.
    """
    orthogonal, per_head = isinstance(RULES[settings["rule"]], MatrixRule), settings.get("per_head")
    may_cut = named[name].ndim > 1 and (split_fused or not orthogonal)
    cut = cut_of(name, named[name], modules) if may_cut else {}
    cut = {each: value for each, value in cut.items() if each not in own}
    if not orthogonal or not per_head:
        return cut
    if per_head is True and not any(heads_of(each, modules) for each in named):
        raise ValueError(
            f"per_head has no meaning for a {type(modules['']).__name__}, whose attention declares "
            "no heads (head_rows): remove it"
        )
    return cut if per_head == "auto" and "split" in own else cut | heads_of(name, modules)


def _check_claimed(by_name: Iterable[str], by_pattern: Sequence[tuple[str, Settings]]) -> None:
    """Raise `ValueError` for a pattern that claims none of the parameters `by_name`."""
    claimed = {_claim(name, by_pattern)[0] for name in by_name}
    for pattern, _ in by_pattern:
        if pattern not in claimed:
            raise ValueError(
                f"by_pattern: {pattern!r} claims no parameter "
                "(or an earlier pattern claimed them all)"
            )


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


def _changed(group: dict[str, Any], changes: dict[str, Any], where: str) -> dict[str, Any]:
    """Return a group's settings with `changes`, checked. `where` names the group in errors."""
    changed, known = group | changes, group_settings()
    try:
        check_rule(changed["rule"])
        of_rule = RULES[changed["rule"]].defaults
        for key, value in changes.items():
            if key not in ("rule", *known):
                raise ValueError(
                    f"{key} is no setting of a group: those are rule, {', '.join(known)}"
                )
            shared = key in known and known[key].scope == "both"
            if shared and value is not None and key not in of_rule:
                raise ValueError(f'{key} has no meaning for "{changed["rule"]}": remove it')
        if "clip" in changed:
            changed["clip"] = _clip(changed["clip"])
        if changed.get("per_head") is True and "split" in changed:
            raise ValueError(
                "split does not go with per_head, which splits by heads: remove it, or set "
                "per_head = false beside it"
            )
        for key in known.keys() & changed.keys():
            known[key].check(changed[key])
    except ValueError as error:
        raise ValueError(f"{where}.{error}") from None
    return changed


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
    rule = group.get("rule", defaults["rule"])
    check_rule(rule)
    for setting in RULES[rule].settings:
        if setting.scope != "optimizer" and setting.name not in given:
            group.setdefault(setting.name, setting.default)
    if (defaults | group).get("per_head") == "auto":  # `param_groups` has asked the model
        group["per_head"] = False
    check_group(defaults | group, number)
    group["params"] = checked_params(group["params"])
    if isinstance(group["params"], list):
        ids = {id(each[1] if isinstance(each, tuple) else each) for each in group["params"]}
        if len(ids) < len(group["params"]):
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
        found = next((repr(name) for name in names if looks_outer(name)), None)
        if found or not names:
            rule = group["rule"]
            warnings.warn(
                f"MARS(rule={rule!r}) orthogonalises {found or 'parameters without names'}: that "
                "is wrong for embeddings and heads. "
                f"MARS(param_groups(model, {rule!r})) gives them their own rule",
                stacklevel=3,
            )
            return
