"""From a config to the optimizer that it asks for, on any device, the meta device included."""

import torch
from torch import nn

from torchmars.config import ResolvedConfig
from torchmars.core.errors import UserError
from torchmars.optim import MARS, param_groups


def build_optimizer(config: ResolvedConfig, model: nn.Module) -> MARS:
    """The optimizer over `model`'s parameters. Raises `UserError` for groups that do not fit them."""
    optimizer = config.optimizer
    try:
        return MARS(
            param_groups(model, **optimizer.settings()),
            max_grad_norm=config.training.max_grad_norm or None,
            exact=optimizer.mode == "exact",
            overlap=optimizer.overlap,
            last_grad_dtype=getattr(torch, optimizer.last_grad_dtype),
            matrix_dtype=optimizer.matrix_dtype,
        )
    except ValueError as error:
        raise UserError(f"optimizer: {error}") from None
