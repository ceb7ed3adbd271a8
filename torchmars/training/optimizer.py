"""The optimizer of a run, on any device, the meta device included; its schedule; an average."""

from collections.abc import Mapping

import torch
from torch import Tensor

from torchmars.config import ResolvedConfig
from torchmars.core.errors import UserError
from torchmars.models import Model
from torchmars.models.base import factors_of
from torchmars.optim import MARS, lr_factor, param_groups
from torchmars.optim.tensors import local_part, unwrapped
from torchmars.parallel.layout import Layout


def build_optimizer(
    config: ResolvedConfig,
    model: Model,
    weights: Mapping[str, Tensor] | None = None,
    layout: Layout | None = None,
) -> MARS:
    """Make the optimizer over the parameters of `model`, which may be on the meta device.

    With `weights`, those that a rank of `layout` has a part of, it is over them: `model` is then
    only asked for roles. Raises `UserError` for groups that do not fit the model.
    """
    section = config.optimizer
    try:
        # Other than by heads, fused weights of our models stay whole, as in the published runs.
        settings = section.settings() | {"split_fused": False}
        if config.training.router_z_loss:  # its gradient has a mean over experts
            settings["by_role"].setdefault("router", {})["zero_mean"] = False
        groups = param_groups(model, factors=factors_of(model, config.transfer), **settings)
        if weights is not None:
            for group in groups:
                names = [name for name, _ in group["params"] if name in weights]
                group["params"] = [(name, weights[name]) for name in names]
        return MARS(
            [group for group in groups if group["params"]],
            max_grad_norm=config.training.max_grad_norm or None,
            exact=section.mode == "exact",
            momentum_dtype=getattr(torch, section.momentum_dtype),
            last_grad_dtype=getattr(torch, section.last_grad_dtype),
            matrix_dtype=section.matrix_dtype,
            norm_group=None if layout is None else layout.norm_group,
        )
    except ValueError as error:
        raise UserError(f"optimizer: {error}") from None


class Schedule:
    """Sets the learning rate of every group, in proportion to its first value."""

    def __init__(self, config: ResolvedConfig, optimizer: MARS) -> None:
        self.config, self.optimizer = config, optimizer
        self.began = [group["lr"] for group in optimizer.param_groups]

    def apply(self, step: int) -> float:
        """Set the rates of step number `step`, from 1; return the peak rate's value."""
        config, total = self.config.schedule, self.config.training.steps
        peak = self.config.optimizer.lr
        factor = lr_factor(
            step,
            total,
            name=config.name,
            floor=config.min_lr / peak,
            warmup_steps=config.warmup_steps,
            decay_steps=config.decay_steps,
            power=config.power,
        )
        for group, lr in zip(self.optimizer.param_groups, self.began):
            group["lr"] = lr * factor
        return peak * factor


class MovingAverage:
    """An exponential moving average of `weights`, by name, sharded as they are.

    After each step it is `decay` times itself and `1 - decay` times the weights (Polyak and
    Juditsky 1992, with exponential weights). It begins as the weights are.
    """

    @torch.no_grad()
    def __init__(self, weights: Mapping[str, Tensor], decay: float) -> None:
        self.decay = decay
        self.values = {name: unwrapped(weight).clone() for name, weight in weights.items()}
        """The average of each weight."""
        self._ours = [local_part(value) for value in self.values.values()]
        self._weights = [local_part(weight) for weight in weights.values()]

    @torch.no_grad()
    def begin(self) -> None:
        """Begin with the weights as they are now."""
        torch._foreach_copy_(self._ours, self._weights)

    @torch.no_grad()
    def update(self) -> None:
        """Take in the weights that a step has made, in one fused pass."""
        torch._foreach_lerp_(self._ours, self._weights, 1 - self.decay)
