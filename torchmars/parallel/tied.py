"""A token table that is the head too, in a pipeline: the first and the last stage each have one.

The first stage's table is the weight of the model: optimizer and checkpoints know no other. The
last stage has a copy, whose gradient it gives to the first, and gets the new weights back.
"""

import torch
from torch import Tensor

from torchmars.optim.tensors import local_part
from torchmars.parallel.groups import RankGroup


class TiedTable:
    """The token table of the first stage and its copy in the last one, as this rank has them."""

    def __init__(
        self, original: Tensor | None, copy: Tensor | None, ranks: RankGroup, last_rank: int
    ) -> None:
        """`ranks` are the pipeline's: the first has the original, `last_rank` the copy."""
        self.original, self.copy = original, copy
        self.ranks, self.last_rank = ranks, last_rank

    def add_gradients(self) -> None:
        """Add the copy's gradient to the original's, and drop it."""
        if self.copy is not None:
            gradient = gradient_of(self.copy)
            if self.original is not None:
                gradient_of(self.original).add_(gradient)
            else:
                self.ranks.send(gradient, 0)
            self.copy.grad = None
        elif self.original is not None:
            gradient = gradient_of(self.original)
            gradient.add_(self.ranks.receive(torch.empty_like(gradient), self.last_rank))

    @torch.no_grad()
    def copy_weights(self) -> None:
        """Copy the original's weights to the copy."""
        if self.copy is not None:
            target = local_part(self.copy)
            if self.original is not None:
                target.copy_(local_part(self.original))
            else:
                self.ranks.receive(target, 0)
        elif self.original is not None:
            self.ranks.send(local_part(self.original), self.last_rank)


def gradient_of(parameter: Tensor) -> Tensor:
    """Return this rank's part of a parameter's gradient."""
    assert parameter.grad is not None
    return local_part(parameter.grad)
