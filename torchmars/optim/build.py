"""From a model and an optimizer's name to the optimizer, its state in place."""

from typing import Any

import torch
from torch import nn

from torchmars.optim.mars import MARS
from torchmars.optim.param_groups import param_groups


def build_optimizer(model: nn.Module, name: str, **settings: Any) -> torch.optim.Optimizer:
    """`MARS`, or torch's fused AdamW for "adamw", over the groups that `param_groups` makes of `model`.

    Both have their state from the start, so that a checkpoint can be loaded into it. Raises `ValueError` as
    `param_groups` does.
    """
    groups = param_groups(model, name, **settings)
    if name != "adamw":
        return MARS(groups)
    optimizer = torch.optim.AdamW(groups, fused=True)
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter).detach(),
            "exp_avg_sq": torch.zeros_like(parameter).detach(),
        }
    return optimizer
