"""The update rules: which buffers each keeps, and which hyperparameters it takes."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rule:
    """What an update is made of."""

    kind: str
    """"adamw", "sign" (Lion) or "matrix" (orthogonalised)."""
    corrected: bool
    """Whether the gradient is variance-reduced (MARS)."""
    aspect_scale: bool = False
    """matrix: scale by max(1, rows / cols)^(1/2) (Shampoo) instead of 0.2 max(rows, cols)^(1/2) (Moonlight)."""

    def buffers(self, lean: bool) -> list[str]:
        """Names of the state tensors as large as the parameter."""
        if not self.corrected:
            return {
                "adamw": ["exp_avg", "exp_avg_sq"],
                "sign": ["exp_avg"],
                "matrix": ["momentum_buffer"],
            }[self.kind]
        if lean:
            return ["momentum"]
        return (
            ["exp_avg", "exp_avg_sq", "last_grad"]
            if self.kind == "adamw"
            else ["exp_avg", "last_grad"]
        )

    def matrix_scale(self, rows: int, cols: int) -> float:
        """What an orthogonalised [rows, cols] matrix is multiplied by."""
        return max(1.0, rows / cols) ** 0.5 if self.aspect_scale else 0.2 * max(rows, cols) ** 0.5


RULES = {
    "mars-adamw": Rule("adamw", corrected=True),
    "mars-lion": Rule("sign", corrected=True),
    "mars-shampoo": Rule("matrix", corrected=True, aspect_scale=True),
    "mars-m": Rule("matrix", corrected=True),
    "adamw": Rule("adamw", corrected=False),
    "lion": Rule("sign", corrected=False),
    "muon": Rule("matrix", corrected=False),
}


def is_lean(group: dict[str, Any], exact: bool) -> bool:
    """Whether a group needs no last gradient: only a momentum is used, and it follows from one buffer without the clip."""
    rule = RULES[group["rule"]]
    return not rule.corrected or (rule.kind != "adamw" and group["clip"] is None and not exact)


def state_fits(rule: str, wanted: Iterable[str], saved_rule: str, saved: Iterable[str]) -> bool:
    """Whether `rule` can go on from state of the names `saved` that `saved_rule` left.

    Moving averages mean the same under every rule that keeps them; the lean "momentum" only under
    its own. A last gradient may be missing: it is started anew.
    """
    missing = set(wanted) - set(saved)
    return missing <= {"last_grad"} and ("momentum" not in wanted or rule == saved_rule)


# Lion and Muon once kept a buffer that was scaled by the betas, and called it "momentum".
UNSCALED = {"lion": "exp_avg", "muon": "momentum_buffer"}


def current_name(rule: str, saved_name: str) -> str:
    """Today's name of a state tensor of `rule` that was saved as `saved_name`."""
    return UNSCALED.get(rule, saved_name) if saved_name == "momentum" else saved_name


def unscaling(rule: str, betas: Sequence[float]) -> float:
    """What a "momentum" of Lion or Muon that was saved under `betas` is multiplied by.

    0 where the scale was 0: nothing is left of the buffer then, and nothing depends on it.
    """
    beta1, beta2 = betas
    scale = beta1 / beta2 if rule == "lion" else beta1 * (1 - beta1)
    return 1 / scale if scale else 0.0


def check_hyperparameters(suffix: str = "", **values: Any) -> None:
    """Raise `ValueError`, naming the argument (with `suffix`), for a hyperparameter out of its range.

    Knows rule, lr, eps (> 0), weight_decay, gamma, gamma_next (>= 0), betas (two numbers in [0, 1)), clip and max_grad_norm (> 0 or None).
    """
    for name, value in values.items():
        try:
            good, wanted = _in_range(name, value)
        except TypeError:  # no number at all
            good, wanted = False, "numbers" if name == "betas" else "a number"
        if not good:
            raise ValueError(f"{name}{suffix} must be {wanted}, got {value}")


def _in_range(name: str, value: Any) -> tuple[bool, str]:
    """Whether a hyperparameter is good, and what it should be."""
    if name == "rule":
        return value in RULES, f"one of {', '.join(RULES)}"
    if name == "betas":
        return len(value) == 2 and all(0 <= beta < 1 for beta in value), "two numbers in [0, 1)"
    if name == "eps":
        return value > 0, "more than 0"
    if name in ("clip", "max_grad_norm"):
        return value is None or value > 0, "more than 0, or None for no clip"
    return value is None and name == "gamma_next" or 0 <= value < float("inf"), "at least 0"


def check_parameter(parameter: Tensor, local: Tensor, rule: str, name: str) -> None:
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
    if RULES[rule].kind == "matrix" and parameter.ndim < 2:
        raise ValueError(
            f"a matrix rule needs parameters of at least two dimensions, {name} has "
            f"shape {tuple(parameter.shape)}: MARS(param_groups(model, {rule!r})) gives "
            "norms and biases, embeddings and heads their own rule"
        )
    if RULES[rule].kind == "matrix" and not local.is_contiguous():
        raise ValueError(
            f"params of a matrix rule must be contiguous, {name} has strides {local.stride()}"
        )
    if torch.empty_like(local).stride() != local.stride():
        raise ValueError(f"params must be dense in memory, {name} has strides {local.stride()}")
