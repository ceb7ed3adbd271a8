"""The optimizer of a run, on any device, the meta device included."""

import torch
from torch import nn

from torchmars.config import ResolvedOptimizer
from torchmars.core.errors import UserError
from torchmars.optim import MARS, param_groups
from torchmars.parallel.layout import Layout


def build_optimizer(
    config: ResolvedOptimizer, max_grad_norm: float, model: nn.Module, layout: Layout | None = None
) -> MARS:
    """Make the optimizer over `model`'s parameters, which may be on the meta device.

    `max_grad_norm` 0 switches the global clip off. Without a `layout` the model is whole. Raises
    `UserError` for groups that do not fit it.
    """
    try:
        return MARS(
            param_groups(model, **config.settings()),
            max_grad_norm=max_grad_norm or None,
            exact=config.mode == "exact",
            overlap=config.overlap,
            last_grad_dtype=getattr(torch, config.last_grad_dtype),
            matrix_dtype=config.matrix_dtype,
            norm_group=None if layout is None else layout.norm_group,
        )
    except ValueError as error:
        raise UserError(f"optimizer: {error}") from None
