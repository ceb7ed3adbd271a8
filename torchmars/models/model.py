"""The interface of a model of any family."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from torchmars.config.model_args import ModelArgs
from torchmars.core.errors import UserError
from torchmars.models.attention import CausalAttention, Reach, Sight
from torchmars.models.documents import document_positions
from torchmars.models.moe import MoE

# How tensor parallelism cuts a layer's weight [out, in]: by rows, by columns, or, for token tables
# [vocabulary, width], by tokens. "fused rows": by rows within each of the three equal parts of a
# fused query, key and value projection. "positions": every rank has all of it, for its own part of
# the positions. "whole": so it has, for its own part of the sequences, before `attn.gather`.
# "gathered rows": by rows, after that.
TensorParallelCut = Literal[
    "rows", "fused rows", "columns", "tokens", "positions", "whole", "gathered rows"
]


class Head(nn.Linear):
    """A head with weights of its own, without biases."""

    def __init__(self, width: int, rows: int) -> None:
        super().__init__(width, rows, bias=False)

    def forward(
        self, hidden: Tensor, function: Callable[[Tensor, Tensor], Tensor] = nn.functional.linear
    ) -> Tensor:
        """Return `function` of hidden states and weight [rows, width], by default the logits."""
        return function(hidden, self.weight)


def added(x: Tensor, branch: Tensor, factor: float) -> Tensor:
    """Return the residual stream `x` with the output of a `branch` times `factor`."""
    return x + branch if factor == 1 else x + branch * factor


class Table(nn.Embedding):
    """A table of vectors that has no values on the meta device.

    torch would "draw" them there, and import its compiler for that: a second of every launcher.
    """

    def reset_parameters(self) -> None:
        """Draw the values, where there is memory for them."""
        if not self.weight.is_meta:
            super().reset_parameters()


class Model(nn.Module, ABC):
    """A decoder-only language model: a plain module that knows no parallelism.

    It is `embed`, then `transform` (the blocks), then `norm`, then `head`. They are apart, so that
    a pipeline may have some of them only, and a loss may take the logits in chunks.
    """

    settings: ClassVar[type[ModelArgs]]
    """What it is made from: its settings in [model], and its named sizes."""
    inputs: ClassVar[tuple[str, ...]]
    """The modules that only `embed` uses."""
    cuts: ClassVar[dict[str, TensorParallelCut]]
    """How tensor parallelism cuts each layer, by the end of its name. Norms stay whole."""
    multipliers: ClassVar[tuple[str, ...]] = ("logits",)
    """Which of `args.multipliers` it applies. `head` applies "logits". Blocks apply "residual" to
    what they add (`added`), and "attention" by the `scale` of their `CausalAttention`. A class that
    derives from another says it again."""

    tok_embed: nn.Embedding
    """The token table [vocab_rows, width]."""
    blocks: nn.ModuleDict
    """The layers that repeat, by number: units of FSDP, compilation and pipeline stages. A part
    of a model has some of them only, under the same numbers. Each has `attn` and `mlp`, modules
    that take hidden states first and return such: tensor parallelism cuts them, and gathers whole
    sequences before them or, where `attn` has a `gather`, there. `attn.attend`, a
    `CausalAttention`, is the only way from token to token: context parallelism and `Cache` replace
    its `reach`. `attn.head_rows` says, by the name of a layer, how the rows of its weight are cut
    into pieces, each of one head (`split` of an optimizer's group). `attn.logit_rows` says of those
    that make logits what each piece makes: "query" or "key" of the next head, "lone query" (the
    part of a head's whose key is every head's) or "". `attn.logit_bound` is the setting that bounds
    logits whatever these rows are, a norm or a cap, if there is one. Layers have no other output.
    One may count, where it is told to (`parallel/balance.py`), and may add to a gradient by an
    autograd function, whose backward pass some schedules make twice."""
    norm: nn.Module
    """The norm between the last block and the head."""
    output: Head | None
    """The head's weights; None if the token table is the head too."""
    n_layer: int
    """Blocks of the whole model."""
    seq_len: int
    """Tokens that the model takes at most."""
    width: int
    """Size of a hidden state."""
    vocab_rows: int
    """Rows of the token table: the vocabulary and its padding."""
    heads: tuple[int, int]
    """Heads of the queries, and of the keys and values."""
    head_width: int
    experts: int = 0
    """Experts of each block that has some; 0: none has."""
    dropout: float = 0.0
    """Probability of dropout in training."""

    def __init__(self, args: Any) -> None:
        """Make the model of `args`, an instance of `settings`. Weights are not initialised."""
        super().__init__()
        self.args, self.seq_len, self.vocab_rows = args, args.seq_len, args.vocab_size

    def forward(
        self, tokens: Tensor, positions: Tensor | None = None, starts: Tensor | None = None
    ) -> Tensor:
        """Return the hidden states [batch, length, width] of token ids [batch, length].

        `positions` [batch, length] or [length] counts from 0 where it is not given. With `starts`
        [batch, documents], where documents begin (`document_starts`), each is computed as if alone.
        """
        length = tokens.shape[1]
        if positions is None:
            positions = torch.arange(length, device=tokens.device)
            if starts is not None:
                positions = document_positions(starts, length)
        x = self.embed(tokens, positions)
        sight = self.sight_of(starts, length, x)
        hidden: Tensor = self.norm(self.transform(x, positions, sight))
        return hidden

    def sight_of(self, starts: Tensor | None, length: int, x: Tensor) -> Sight | None:
        """Return how the blocks here, which get `x`, keep documents apart; None: they do not.

        `starts` are those of whole sequences of `length` tokens.
        """
        if starts is None:
            return None
        return Sight.of_documents(starts, length, x, self.dropout)

    @abstractmethod
    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Return the first block's input, [batch, length, width]."""

    @abstractmethod
    def transform(self, x: Tensor, positions: Tensor, sight: Sight | None) -> Tensor:
        """Pass `x` [batch, length, width] through the blocks that are here.

        Tokens attend to those before them that they see, to all without `sight`.
        """

    def head(
        self, hidden: Tensor, function: Callable[[Tensor, Tensor], Tensor] = nn.functional.linear
    ) -> Tensor:
        """Return the logits [..., vocab_rows] of the hidden states [..., width] after `norm`.

        Or return another `function` of these and of the head's weight [vocab_rows, width].
        """
        if (factor := self.args.multipliers.logits) != 1:
            hidden = hidden * factor
        if self.output is None:
            return function(hidden, self.tok_embed.weight)
        result: Tensor = self.output(hidden, function=function)
        return result

    def attention(self) -> Iterator[CausalAttention]:
        """Yield where the tokens of each block that is here meet."""
        return (each for each in self.blocks.modules() if isinstance(each, CausalAttention))

    def let_reach(self, reach: Callable[[], Reach]) -> None:
        """Let the attention of each block that is here reach its keys and values in another way.

        Raises `UserError` for a plugin's model that has an attention of its own in a block.
        """
        for number, block in self.blocks.items():
            own = [each for each in block.modules() if isinstance(each, CausalAttention)]
            if not own or any(type(each).forward is not CausalAttention.forward for each in own):
                raise UserError(
                    f"block {number} of {type(self).__name__} has an attention of its own, which "
                    "can be neither cached nor shared by ranks: derive it from CausalAttention "
                    "(torchmars.models.attention), and override `mix` alone"
                )
            for each in own:
                each.reach = reach()

    def routed(self) -> dict[str, MoE]:
        """Return the mixtures of experts of the blocks that are here, by the block's number.

        Each is the block's `mlp`. A model that has others than `MoE` overrides this. Layouts ask
        nothing else, and use what the docstring of `MoE` names.
        """
        mlps = {number: block.mlp for number, block in self.blocks.items()}
        return {number: mlp for number, mlp in mlps.items() if isinstance(mlp, MoE)}

    def init_std(self, name: str) -> float | None:
        """Return the standard deviation of the initial values of a parameter; None: all are 1.

        As in GPT-2: biases are 0, and what adds to the residual stream begins smaller.
        """
        if name.endswith("bias"):
            return 0.0
        if "norm" in name:
            return None
        adds = name.removesuffix(".weight").endswith("proj")
        return 0.02 / math.sqrt(2 * self.n_layer) if adds else 0.02

    @property
    def parameter_count(self) -> int:
        """How many parameters there are."""
        return sum(each.numel() for each in self.parameters())

    @property
    def active_count(self) -> int:
        """How many parameters one token uses: of many experts, the chosen ones."""
        return sum(self.used_parameters(name, each) for name, each in self.named_parameters())

    @property
    def counts_in_words(self) -> str:
        """How many parameters there are and, where that differs, how many a token uses."""
        total, active = self.parameter_count, self.active_count
        return f"{total:,} parameters" + (f" ({active:,} active)" if active < total else "")

    def used_parameters(self, name: str, parameter: Tensor) -> int:
        """Return how many values of the parameter called `name` one token uses."""
        return parameter.numel()

    def flops_per_token(self) -> int:
        """Return the FLOPs of the forward and backward pass of one token at full length.

        6 per parameter that a token uses in a matrix product, and in each block, for attention to T
        tokens, 6 T times the `mixed_width`. Source: Chowdhery et al. 2022, appendix B.
        """
        tables = {f"{name}.weight" for name in self.inputs}
        if self.output is None:
            tables.remove("tok_embed.weight")  # it is the head too
        matrices = sum(
            self.used_parameters(name, parameter)
            for name, parameter in self.named_parameters()
            if parameter.ndim > 1 and name not in tables
        )
        attended = sum(self.attended(number) for number in range(self.n_layer))
        return 6 * matrices + 6 * self.mixed_width * attended

    @property
    def mixed_width(self) -> int:
        """Width of a token's queries and of its mixed values, in a block."""
        return 2 * self.heads[0] * self.head_width

    @property
    def kept_width(self) -> int:
        """Width of what a block's attention keeps of a token, in caches and between ranks of cp."""
        return 2 * self.heads[1] * self.head_width

    def attended(self, number: int) -> int:
        """Return how many tokens the last token of a full sequence attends to in a block."""
        return self.seq_len

    @abstractmethod
    def describe(self) -> str:
        """Return the shape in words, for the console."""
