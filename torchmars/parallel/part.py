"""A part of a model: consecutive layers, from tokens to the loss or some of that way."""

from functools import partial
from typing import Literal

from torch import Tensor, nn

from torchmars.config import TrainingConfig
from torchmars.models import Model
from torchmars.models.documents import document_positions
from torchmars.parallel.context import SequencePart
from torchmars.parallel.layout import Layout
from torchmars.parallel.loss import chunk_tokens, mean_loss, token_losses, token_scores

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
