"""The loss of a language model, and its gradient over a global batch."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchmars.parallel.recipe import reduce_gradients


def token_losses(model: nn.Module, tokens: Tensor) -> Tensor:
    """The cross-entropy of each target in windows [batch, T + 1]: float32 [batch, T]."""
    tokens = tokens.to(next(model.parameters()).device, non_blocking=True)
    logits = model(tokens[:, :-1])
    targets = tokens[:, 1:]
    return F.cross_entropy(
        logits.float().flatten(0, 1), targets.flatten(), reduction="none"
    ).view_as(targets)


def backward(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    """Accumulate the gradient of the mean loss over a global batch, of which `batch` are this rank's microbatches; this rank's mean loss."""
    loss = torch.zeros((), device=next(model.parameters()).device)
    for microbatch, tokens in enumerate(batch, start=1):
        reduce_gradients(model, last=microbatch == len(batch))
        # All microbatches are of one size, so the mean of their means is the mean over the global batch's tokens.
        part = token_losses(model, tokens).mean() / len(batch)
        part.backward()
        loss += part.detach()
    return loss
