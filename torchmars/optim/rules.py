"""The update rules: which buffers each keeps, and which hyperparameters it takes."""

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
            return ["exp_avg", "exp_avg_sq"] if self.kind == "adamw" else ["momentum"]
        if lean:
            return ["momentum"]
        return ["exp_avg", "exp_avg_sq", "last_grad"] if self.kind == "adamw" else ["exp_avg", "last_grad"]

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


def check_hyperparameters(suffix: str = "", **values: Any) -> None:
    """Raise `ValueError`, naming the argument (with `suffix`), for a hyperparameter out of its range.

    Knows rule, lr, eps (> 0), weight_decay, gamma, gamma_next (>= 0), betas (two numbers in [0, 1)), clip and max_grad_norm (> 0 or None).
    """
    for name, value in values.items():
        if name == "rule":
            good, wanted = value in RULES, f"one of {', '.join(RULES)}"
        elif name == "betas":
            good, wanted = len(value) == 2 and all(0 <= beta < 1 for beta in value), "two numbers in [0, 1)"
        elif name == "eps":
            good, wanted = value > 0, "more than 0"
        elif name in ("clip", "max_grad_norm"):
            good, wanted = value is None or value > 0, "more than 0, or None for no clip"
        else:
            good, wanted = value is None and name == "gamma_next" or 0 <= value < float("inf"), "at least 0"
        if not good:
            raise ValueError(f"{name}{suffix} must be {wanted}, got {value}")


def check_parameter(parameter: Tensor, local: Tensor, rule: str) -> None:
    """Raise `ValueError` for a parameter that `rule` cannot update; `local` is this rank's part of it."""
    # FSDP1's mark on its FlatParameter, and on the views of it that use_orig_params=True shows:
    # private, torch 2.11 to 2.13.
    if getattr(parameter, "_fsdp_flattened", False):
        raise ValueError("params must be whole tensors or DTensors, got a flattened part of FSDP1 "
                         "(FullyShardedDataParallel), whose norms cannot be known: "
                         "use FSDP2, torch.distributed.fsdp.fully_shard")
    if not parameter.is_floating_point():
        raise ValueError(f"params must be real floating-point tensors, got one of {parameter.dtype}")
    if RULES[rule].kind == "matrix" and not local.is_contiguous():
        raise ValueError(f"params of a matrix rule must be contiguous, got one of strides {local.stride()}")
    if torch.empty_like(local).stride() != local.stride():
        raise ValueError(f"params must be dense in memory, got one of strides {local.stride()}")
