"""What the rest of the package may ask of a model, whatever its family."""

from abc import ABC, abstractmethod
from typing import ClassVar, Literal, Self

from torch import Tensor, nn

from torchmars.config import ModelConfig

# How tensor parallelism cuts a layer's weight [out, in]: by rows, by columns, or, for token tables
# [vocabulary, width], by tokens. "whole": every rank has all of it.
TensorParallelCut = Literal["rows", "columns", "tokens", "whole"]


class Model(nn.Module, ABC):
    """A decoder-only language model: a plain module that knows no parallelism.

    `forward` ends with the hidden states. `head` makes logits of them, apart, so that a loss may
    take them in chunks and a pipeline may end before it.
    """

    cuts: ClassVar[dict[str, TensorParallelCut]]
    """How tensor parallelism cuts each weight, by the end of its name. Norm weights stay whole."""

    blocks: nn.ModuleList
    """The layers that repeat: units of FSDP, of compilation and of pipeline stages."""
    seq_len: int
    """Tokens that the model takes at most."""
    width: int
    """Size of a hidden state."""
    vocab_rows: int
    """Rows of the token table: the vocabulary and its padding."""

    @classmethod
    @abstractmethod
    def from_config(cls, config: ModelConfig, vocab_size: int, seq_len: int) -> Self:
        """Make the model that `config` asks for, for a tokenizer of `vocab_size` tokens.

        Its weights are not initialised. Raises `UserError` for a shape that cannot be built.
        """

    @abstractmethod
    def forward(
        self, tokens: Tensor, positions: Tensor | None = None, documents: Tensor | None = None
    ) -> Tensor:
        """Return the hidden states [batch, length, width] of token ids [batch, length].

        `positions` [batch, length] or [length] counts from 0 where it is not given. With
        `documents` [batch, length], tokens attend to earlier ones of the same number only.
        """

    @abstractmethod
    def head(self, hidden: Tensor) -> Tensor:
        """Return the logits [..., vocab_rows] of hidden states [..., width]."""

    @abstractmethod
    def init_std(self, name: str) -> float | None:
        """Return the standard deviation of the initial values of a parameter; None: all are 1."""

    @abstractmethod
    def flops_per_token(self) -> int:
        """Return the FLOPs of the forward and backward pass of one token at full length."""

    @abstractmethod
    def describe(self) -> str:
        """Return the shape in words, for the console."""
