"""Roles of a model's parameters, and the optimizer groups that follow from them.

Source: the table "who gets which rule" of the MARS runs (Yuan et al., arXiv 2411.10438, and its code): hidden
matrices and embeddings get MARS, vectors (norm weights, biases) AdamW with settings of their own.
"""

from typing import Any

from torch import nn

from torchmars.optim.mars import check_hyperparameters

# The published settings for GPT-2 small. None: half of lr.
DEFAULTS: dict[str, dict[str, Any]] = {
    "mars-adamw": {"lr": 6e-3, "betas": (0.95, 0.99), "eps": 1e-8, "weight_decay": 0.01, "gamma": 0.025, "clip": 1.0,
                   "optimize_1d": False, "lr_1d": None, "betas_1d": (0.9, 0.95), "weight_decay_1d": 0.1},
    "adamw": {"lr": 6e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1},
}
HEAD_NAMES = ("head", "lm_head", "output", "classifier")


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
    check_hyperparameters(**{key: settings[key] for key in ("lr", "betas", "eps", "weight_decay")})
    if name == "mars-adamw":
        if settings["lr_1d"] is None:
            settings["lr_1d"] = settings["lr"] / 2
        check_hyperparameters(gamma=settings["gamma"], clip=settings["clip"] or None)
        check_hyperparameters("_1d", **{key: settings[f"{key}_1d"] for key in ("lr", "betas", "weight_decay")})
    return settings


def roles(model: nn.Module) -> dict[str, str]:
    """The role of every trainable parameter, by name: "embedding", "head", "vector" or "matrix".

    A parameter of an `nn.Embedding` is an embedding, also where an output layer shares it; the weight of a module
    named head, lm_head, output or classifier is the head; what has fewer than two dimensions is a vector.
    """
    embeddings = {id(parameter) for module in model.modules() if isinstance(module, nn.Embedding)
                  for parameter in module.parameters(recurse=False)}
    result = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if id(parameter) in embeddings:
            result[name] = "embedding"
        elif parameter.ndim < 2:
            result[name] = "vector"
        else:
            result[name] = "head" if name.split(".")[-2:-1] and name.split(".")[-2] in HEAD_NAMES else "matrix"
    return result


def param_groups(model: nn.Module, name: str = "mars-adamw", **settings: Any) -> list[dict[str, Any]]:
    """Groups for `MARS` (or `torch.optim.AdamW`), one for each role that `model` has, with named parameters.

    `settings` override the defaults of optimizer `name`: lr, betas, eps, weight_decay and, for mars-adamw, gamma,
    clip, optimize_1d, lr_1d, betas_1d, weight_decay_1d. Embeddings get no weight decay under MARS, vectors none under
    AdamW. Raises `ValueError` as `complete_settings` does.
    """
    settings = complete_settings(name, **settings)
    shared = {key: settings[key] for key in ("lr", "betas", "eps", "weight_decay")}
    if name == "adamw":
        by_role = {role: shared for role in ("matrix", "embedding", "head")} | {"vector": shared | {"weight_decay": 0.0}}
    else:
        mars = shared | {"rule": "mars-adamw", "gamma": settings["gamma"], "clip": settings["clip"] or None}
        vector = {"rule": "adamw", "lr": settings["lr_1d"], "betas": settings["betas_1d"],
                  "eps": settings["eps"], "weight_decay": settings["weight_decay_1d"]}
        by_role = {"matrix": mars, "embedding": mars | {"weight_decay": 0.0}, "head": mars,
                   "vector": mars if settings["optimize_1d"] else vector}
    named = dict(model.named_parameters())
    role_of = roles(model)
    groups = [{"params": [(key, named[key]) for key in role_of if role_of[key] == role], "role": role} | group
              for role, group in by_role.items()]
    return [group for group in groups if group["params"]]
