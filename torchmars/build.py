"""From a config to the model and optimizer it asks for, on any device, the meta device included."""

import torch
from torch import nn

from torchmars.config import Config
from torchmars.errors import UserError
from torchmars.models import GPT2, build_model, model_args
from torchmars.optim import MARS, param_groups


def build_meta_model(config: Config, vocab_size: int) -> GPT2:
    """The model without memory, for a tokenizer of `vocab_size` tokens: its shapes and names. Raises `UserError` for a shape that cannot be built."""
    with torch.device("meta"):
        return build_model(model_args(config.model, vocab_size, config.training.seq_len))


def build_optimizer(config: Config, model: nn.Module) -> MARS:
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
