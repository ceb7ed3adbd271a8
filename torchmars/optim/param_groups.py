"""Roles of a model's parameters, and the optimizer groups that follow from them.

Source: the table "who gets which rule" of the MARS and MARS-M papers and their code (arXiv 2411.10438, 2510.21800).
"""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from torchmars.optim.rules import RULES, check_hyperparameters

HEAD_NAMES = ("head", "lm_head", "output", "classifier")
ROLES = ("matrix", "convolution", "embedding", "head", "vector")
GROUP_KEYS = ("rule", "lr", "betas", "eps", "weight_decay", "gamma", "clip", "split", "flatten")

# Settings of each optimizer, for GPT-2 small; published where there are published ones. lr_1d None: half of lr.
_MARS = {"eps": 1e-8, "gamma": 0.025, "clip": 1.0, "optimize_1d": False}
_VECTORS = {"lr_1d": None, "betas_1d": (0.9, 0.95), "weight_decay_1d": 0.1}
DEFAULTS: dict[str, dict[str, Any]] = {
    "mars-adamw": {"lr": 6e-3, "betas": (0.95, 0.99), "weight_decay": 0.01} | _MARS | _VECTORS,
    "mars-lion": {"lr": 6e-4, "betas": (0.95, 0.99), "weight_decay": 0.1} | _MARS | _VECTORS,
    "mars-shampoo": {"lr": 2e-2, "betas": (0.95, 0.99), "weight_decay": 0.01} | _MARS | _VECTORS | {"lr_1d": 3e-3},
    "mars-m": {"lr": 6e-3, "betas": (0.95, 0.99), "weight_decay": 0.1, "eps": 1e-8, "gamma": 0.025, "clip": 1.0, "betas_1d": (0.9, 0.95)},
    "adamw": {"lr": 6e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1},
    "lion": {"lr": 1e-4, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.5},
    "muon": {"lr": 6e-3, "betas": (0.95, 0.99), "eps": 1e-8, "weight_decay": 0.1, "betas_1d": (0.9, 0.95)},
}
SHAMPOO_EMBEDDING_LR = 0.3  # of the matrices' lr: an orthogonal matrix moves its entries less than AdamW does at the same lr


def complete_settings(name: str, **given: Any) -> dict[str, Any]:
    """The settings of optimizer `name`: its defaults, with those `given` in their place.

    Raises `ValueError`, naming the argument, for an unknown name, a setting the optimizer does not have and a value
    out of range. A `clip` of 0 or None switches the per-tensor clip off.
    """
    if name not in DEFAULTS:
        raise ValueError(f"name must be one of {', '.join(DEFAULTS)}, got {name!r}")
    for key in given:
        if key not in DEFAULTS[name]:
            raise ValueError(f'{key} has no meaning for "{name}": remove it')
    settings = DEFAULTS[name] | given
    if "lr_1d" in settings and settings["lr_1d"] is None:
        settings["lr_1d"] = settings["lr"] / 2
    for key, value in settings.items():
        if key != "optimize_1d":
            base = key.removesuffix("_1d")
            check_hyperparameters(key.removeprefix(base), **{base: value or None if key == "clip" else value})
    return settings


def roles(model: nn.Module) -> dict[str, str]:
    """The role of every trainable parameter, by name: "embedding", "head", "vector", "convolution" or "matrix".

    A parameter of an `nn.Embedding` is an embedding, also where an output layer shares it; what has fewer than two dimensions
    is a vector; the weight of a module named head, lm_head, output or classifier is the head; weights of convolutions are
    matrices [out, -1]; all else is a matrix, or a batch of them.
    """
    result = {}
    owners = {id(p): module for module in model.modules() for p in module.parameters(recurse=False)
              if isinstance(module, nn.Embedding | nn.EmbeddingBag | nn.modules.conv._ConvNd)}
    for name, parameter in model.named_parameters():
        module = owners.get(id(parameter))
        if not parameter.requires_grad:
            continue
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            result[name] = "embedding"
        elif parameter.ndim < 2:
            result[name] = "vector"
        elif len(name.split(".")) > 1 and name.split(".")[-2] in HEAD_NAMES:
            result[name] = "head"
        else:
            result[name] = "matrix" if module is None else "convolution"
    return result


def role_settings(name: str, **settings: Any) -> dict[str, dict[str, Any]]:
    """The group settings of each role under optimizer `name`, from its `settings` as `complete_settings` takes them."""
    settings = complete_settings(name, **settings)
    clip = settings.get("clip") or None
    main = {"rule": name, "clip": clip} | {key: settings[key] for key in ("lr", "betas", "eps", "weight_decay")}
    if RULES[name].corrected:
        main["gamma"] = settings["gamma"]
    table = dict.fromkeys(ROLES, main)
    if name in ("adamw", "lion"):
        table["vector"] = main | {"weight_decay": 0.0}
    elif name in ("mars-m", "muon"):
        plain = {"rule": "adamw", "lr": settings["lr"], "betas": settings["betas_1d"], "eps": settings["eps"],
                 "weight_decay": settings["weight_decay"]}
        table |= dict.fromkeys(("embedding", "head", "vector"), plain)
    else:
        if name == "mars-shampoo":
            table |= dict.fromkeys(("embedding", "head"), main | {"rule": "mars-adamw", "lr": settings["lr"] * SHAMPOO_EMBEDDING_LR})
        table["embedding"] = table["embedding"] | {"weight_decay": 0.0}
        table["vector"] = (table["head"] if settings["optimize_1d"] else
                           {"rule": "adamw", "lr": settings["lr_1d"], "betas": settings["betas_1d"], "eps": settings["eps"],
                            "weight_decay": settings["weight_decay_1d"]})
    table["convolution"] = table["convolution"] | {"flatten": True}
    return table


def check_groups(name: str, *, by_role: dict[str, dict[str, Any]], by_pattern: Sequence[tuple[str, dict[str, Any]]], **settings: Any) -> None:
    """Raise the `ValueError` that `param_groups` would raise for these arguments with a model that has every role."""
    table = role_settings(name, **settings)
    for role, changes in by_role.items():
        table[role] = _changed(table[role], changes, role)
    for pattern, changes in by_pattern:
        if not pattern:
            raise ValueError("groups needs a pattern in each of its tables")
        _changed(table["matrix"], changes, pattern)


def param_groups(model: nn.Module, name: str = "mars-adamw", *, by_role: dict[str, dict[str, Any]] | None = None,
                 by_pattern: Sequence[tuple[str, dict[str, Any]]] = (), **settings: Any) -> list[dict[str, Any]]:
    """Groups for `MARS`, with named parameters: one for each pattern and each role that `model` has; each parameter in one.

    Args:
        model: where the parameters and their roles come from (see `roles`).
        name: optimizer whose defaults are used: one of the rules.
        by_role: for a role, group settings that replace the optimizer's: rule, lr, betas, eps, weight_decay, gamma, clip, split, flatten.
        by_pattern: (pattern, group settings) pairs; a parameter whose name matches a pattern (as a shell's) goes to the first one it
            matches, with its role's settings but for those given.
        settings: replace the defaults of optimizer `name`.

    Raises `ValueError`, naming the argument, for anything out of range or without meaning and for a pattern that claims nothing.
    """
    table, given = role_settings(name, **settings), by_role or {}
    for role, changes in given.items():
        if role not in ROLES:
            raise ValueError(f"by_role must name roles of {', '.join(ROLES)}, got {role!r}")
        table[role] = _changed(table[role], changes, role)
    groups: dict[tuple[str, str], dict[str, Any]] = {}
    claimed: set[str] = set()
    named = dict(model.named_parameters())
    for parameter_name, role in roles(model).items():
        pattern = next((pattern for pattern, _ in by_pattern if fnmatchcase(parameter_name, pattern)), None)
        key = (pattern or role, role)
        if key not in groups:
            changes = next((changes for each, changes in by_pattern if each == pattern), {})
            groups[key] = {"params": [], "role": pattern or role} | _changed(table[role], changes, pattern or role)
        if pattern:
            claimed.add(pattern)
        groups[key]["params"].append((parameter_name, named[parameter_name]))
    for pattern, _ in by_pattern:
        if pattern not in claimed:
            raise ValueError(f"by_pattern: {pattern!r} claims no parameter (or an earlier pattern claimed them all)")
    return list(groups.values())


def _changed(group: dict[str, Any], changes: dict[str, Any], where: str) -> dict[str, Any]:
    """A group's settings with `changes`, checked; `where` says in errors whose they are."""
    changed = group | changes
    if not RULES.get(changed["rule"], RULES["adamw"]).corrected:
        for key in ("gamma", "clip"):
            if changes.get(key) is not None:
                raise ValueError(f'{where}.{key} has no meaning for "{changed["rule"]}": remove it')
    for key in changes:
        if key not in GROUP_KEYS:
            raise ValueError(f"{where}.{key} is no setting of a group: those are {', '.join(GROUP_KEYS)}")
    if "clip" in changed:
        changed["clip"] = changed["clip"] or None
    try:
        check_hyperparameters(**{key: changed[key] for key in changed if key not in ("split", "flatten", "role", "params")})
    except ValueError as error:
        raise ValueError(f"{where}.{error}") from None
    return changed
