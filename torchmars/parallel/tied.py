"""A token table that is the head too, in a pipeline: the first and the last stage each have one.

That of the first stage is the weight of the model: optimizer and checkpoints know no other. The
last stage has a copy, whose gradient it gives to the first, and gets the new weights back.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from torchmars.optim.tensors import local_part
from torchmars.parallel.layout import RankGroup


class TiedTable:
    """The token table of the first stage and its copy in the last one, as this rank has them."""

    def __init__(
        self, original: Tensor | None, copy: Tensor | None, ranks: RankGroup, last_rank: int
    ) -> None:
        """`ranks` are those of the pipeline: the first has the original, `last_rank` the copy."""
        self.original, self.copy = original, copy
        self.ranks, self.last_rank = ranks, last_rank

    def add_gradients(self) -> None:
        """Add the copy's gradient to the original's, and drop it."""
        if self.copy is not None:
            gradient = local_gradient(self.copy)
            if self.original is not None:
                local_gradient(self.original).add_(gradient)
            else:
                self._send(gradient, 0)
            self.copy.grad = None
        elif self.original is not None:
            gradient = local_gradient(self.original)
            gradient.add_(self._received(gradient, self.last_rank))

    @torch.no_grad()
    def copy_weights(self) -> None:
        """Copy the original's weights to the copy."""
        if self.copy is not None:
            target = local_part(self.copy)
            source = self.original
            target.copy_(self._received(target, 0) if source is None else local_part(source))
        elif self.original is not None:
            self._send(local_part(self.original), self.last_rank)

    def _send(self, tensor: Tensor, rank: int) -> None:
        dist.send(tensor.contiguous(), group=self.ranks.process_group, group_dst=rank)

    def _received(self, like: Tensor, rank: int) -> Tensor:
        received = torch.empty_like(like)
        dist.recv(received, group=self.ranks.process_group, group_src=rank)
        return received


def local_gradient(parameter: Tensor) -> Tensor:
    """Return this rank's part of a parameter's gradient."""
    gradient = parameter.grad
    assert gradient is not None
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient
