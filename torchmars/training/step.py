"""The loss of a language model, and its gradient over a global batch."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from torchmars.models import Model
from torchmars.parallel.fsdp import reduce_gradients


def token_losses(model: Model, tokens: Tensor) -> Tensor:
    """Return the cross-entropy of each target in windows [batch, T + 1]: float32 [batch, T]."""
    tokens = tokens.to(next(model.parameters()).device, non_blocking=True)
    logits = model.head(model(tokens[:, :-1]))
    targets = tokens[:, 1:]
    losses = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none")
    return losses.view_as(targets)


def backward(model: Model, batch: Sequence[Tensor]) -> Tensor:
    """Accumulate the gradient of the mean loss over a global batch; return this rank's mean loss.

    `batch` are this rank's microbatches, [batch, T + 1] each.
    """
    loss = torch.zeros((), device=next(model.parameters()).device)
    for microbatch, tokens in enumerate(batch, start=1):
        reduce_gradients(model, last=microbatch == len(batch))
        # All microbatches are of one size. So the mean of their means is that over all tokens.
        part = token_losses(model, tokens).mean() / len(batch)
        part.backward()
        loss += part.detach()
    return loss
