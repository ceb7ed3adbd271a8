"""A part of a model: consecutive layers, from tokens to the loss or some of that way.

A token table may be in two parts.
"""

from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from torchmars.config import TrainingConfig
from torchmars.models import Model
from torchmars.models.documents import document_positions
from torchmars.optim.tensors import local_part
from torchmars.parallel.context import SequencePart
from torchmars.parallel.cuts import chunk_tokens
from torchmars.parallel.groups import RankGroup
from torchmars.parallel.layout import Layout
from torchmars.parallel.loss import mean_loss, token_losses, token_scores

# The result of a forward pass with targets: their mean loss, whose gradient can be taken, the loss
# of each, or the log-likelihood of each and whether it is the likeliest token.
Wanted = Literal["mean loss", "losses", "scores"]


class ModelPart(nn.Module):
    """Consecutive layers of a model: a stage of a pipeline, or all of it. The root unit of FSDP.

    `model` has lost the modules that belong to other parts; `first` and `last` say whether it still
    has the embedding and the head. The loss takes `chunk` tokens at a time, and has the gradient of
    a z-loss with coefficient `z_loss`. With `compile_loss` it is compiled for training.
    """

    def __init__(
        self, model: Model, first: bool, last: bool, layout: Layout, training: TrainingConfig
    ) -> None:
        super().__init__()
        self.model, self.first, self.last = model, first, last
        self.sequence = SequencePart.on(layout)
        self.tp = layout.group("tp").size
        """Ranks that hidden states are cut over along the sequence once more."""
        self.chunk = chunk_tokens(layout.device.type, model.vocab_rows // self.tp)
        self.z_loss, self.compile_loss = training.z_loss, bool(training.compile)
        self.keeps_gathered = False
        """Whether its blocks keep the weights that FSDP gathered to the end of a step."""
        self.blocks_of_unit = 1
        """How many of its blocks FSDP gathers together, at most."""

    def forward(
        self,
        x: Tensor,
        targets: Tensor | None = None,
        starts: Tensor | None = None,
        at: int = 0,
        wanted: Wanted = "mean loss",
    ) -> Tensor:
        """Return the next part's input; from the last part, what is `wanted`, or logits.

        `x` are token ids [batch, length] for the first part, and for others hidden states [batch,
        length / tp, width]. With `targets` [batch, length] the last part returns their mean loss, a
        scalar; or the loss of each [batch, length]; or its log-likelihood and 1 if it is the
        likeliest token, else 0, [batch, length, 2]; all in float32. Without them it returns the
        logits [batch, vocab_rows] after the token number `at` of its part of the sequences.
        `starts` [batch, documents] says where the documents of the whole sequences begin, where
        these are kept apart.
        """
        length = x.shape[1] if self.first else x.shape[1] * self.tp
        whole, positions = length * self.sequence.ranks, self.sequence.positions(length, x.device)
        if starts is not None:
            positions = self.sequence.of(document_positions(starts, whole))
        if self.first:
            x = self.model.embed(x, positions)
        x = self.model.transform(x, positions, self.model.sight_of(starts, whole, x))
        if not self.last:
            return x
        hidden: Tensor = self.model.norm(x)
        if targets is None:
            return self.model.head(hidden[:, at])
        if wanted == "mean loss":
            of = partial(
                mean_loss,
                targets=targets,
                chunk=self.chunk,
                z_loss=self.z_loss,
                compile=self.compile_loss,
            )
        else:
            function = token_losses if wanted == "losses" else token_scores
            of = partial(function, targets=targets, chunk=self.chunk)
        return self.model.head(hidden, of)


class TiedTable:
    """A token table that is the head too, in a pipeline: the first and the last stage have one.

    The first stage's table is the weight of the model: optimizer and checkpoints know no other. The
    last stage has a copy, whose gradient it gives to the first, and gets the new weights back.
    """

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
