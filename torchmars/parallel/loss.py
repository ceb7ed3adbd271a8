"""Cross-entropy of logits, also of those whose vocabulary is cut over the ranks of a tp group."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the loss of each target, float32 of the shape of `targets`.

    `logits` [..., vocabulary] may be a DTensor with the vocabulary cut over a mesh of one axis: no
    rank then gathers them.
    """
    if isinstance(logits, DTensor):
        group = logits.device_mesh.get_group()
        losses: Tensor = _CutCrossEntropy.apply(logits.to_local().float(), targets, group)
        return losses
    losses = F.cross_entropy(logits.float().flatten(0, -2), targets.flatten(), reduction="none")
    return losses.view_as(targets).clone()  # FSDP2 warns of views


def is_largest(logits: Tensor, targets: Tensor) -> Tensor:
    """Return whether no logit is larger than that of the target, a bool of the shape of `targets`.

    `logits` are as `cross_entropy` takes them.
    """
    if not isinstance(logits, DTensor):
        return logits.argmax(-1) == targets
    group, local = logits.device_mesh.get_group(), logits.to_local()
    own = targets - dist.get_rank(group) * local.shape[-1]
    largest, place = local.max(-1)
    everywhere = largest.clone()
    dist.all_reduce(everywhere, dist.ReduceOp.MAX, group=group)
    found = ((place == own) & (largest == everywhere)).to(torch.uint8)
    dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
    return found.bool()


class _CutCrossEntropy(torch.autograd.Function):
    """log(sum(exp(logits))) - logit of the target, over the parts of the vocabulary on all ranks.

    Each rank has the same number of rows. The gradient is softmax(logits) - one_hot(target), of
    which a rank has its own part. Source: Shoeybi et al. 2019, arXiv 1909.08053, section 3.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, group: dist.ProcessGroup) -> Tensor:
        rows = logits.shape[-1]
        largest = logits.detach().amax(-1)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        shifted = logits - largest[..., None]
        own = targets - dist.get_rank(group) * rows
        here = (own >= 0) & (own < rows)
        own = own.clamp(0, rows - 1)[..., None]
        of_target = shifted.gather(-1, own)[..., 0] * here
        exponentials = shifted.exp_()
        sums = torch.stack([exponentials.sum(-1), of_target])
        dist.all_reduce(sums, group=group)
        total, of_target = sums.unbind()
        ctx.save_for_backward(exponentials.div_(total[..., None]), own, here)
        return total.log() - of_target

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        probabilities, own, here = ctx.saved_tensors
        gradient = probabilities.scatter_add(-1, own, -here[..., None].to(probabilities.dtype))
        return gradient.mul_(gradients[0][..., None]), None, None
