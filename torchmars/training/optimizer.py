"""The optimizer of a run, on any device, the meta device included."""

import torch
from torch import nn

from torchmars.config import Config
from torchmars.core.errors import UserError
from torchmars.optim import MARS, param_groups
from torchmars.parallel.layout import Layout


def build_optimizer(config: Config, model: nn.Module, layout: Layout | None = None) -> MARS:
    """Make the optimizer over `model`'s parameters, which may be on the meta device.

    Without a `layout` the model is whole. Raises `UserError` for groups that do not fit it.
    """
    optimizer = config.optimizer
    try:
        return MARS(
            param_groups(model, **optimizer.settings()),
            max_grad_norm=config.training.max_grad_norm or None,
            exact=optimizer.mode == "exact",
            overlap=optimizer.overlap,
            last_grad_dtype=getattr(torch, optimizer.last_grad_dtype),
            matrix_dtype=optimizer.matrix_dtype,
            norm_group=None if layout is None else layout.norm_group,
        )
    except ValueError as error:
        raise UserError(f"optimizer: {error}") from None
