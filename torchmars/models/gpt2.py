"""GPT-2, by default as the published MARS runs trained it.

- Learned positions. The token table is also the head.
- Query, key and value are one fused weight; a rank of tensor parallelism has consecutive rows.
- By default no biases, no dropout and the exact GELU. OpenAI's weights need `bias` and "gelu_tanh".
- `scale_attn_by_inverse_layer_idx` divides the attention logits of layer n (from 1) by n.

Sources: Radford et al. 2019 for the architecture; Yuan et al. (arXiv 2411.10438) for the settings.
"""

from dataclasses import dataclass
from typing import ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchmars.config import ModelConfig
from torchmars.core.errors import UserError
from torchmars.core.words import counted
from torchmars.models.attention import CausalAttention, Sight
from torchmars.models.model import Model, Table, TensorParallelCut
from torchmars.models.sizes import make_args

SIZES: dict[str, dict[str, int]] = {
    "nano": {"n_layer": 4, "n_head": 4, "n_embd": 256},
    "small": {"n_layer": 12, "n_head": 12, "n_embd": 768},
    "medium": {"n_layer": 24, "n_head": 16, "n_embd": 1024},
    "large": {"n_layer": 36, "n_head": 20, "n_embd": 1280},
    "xl": {"n_layer": 48, "n_head": 25, "n_embd": 1600},
}


@dataclass(frozen=True)
class GPT2Args:
    """Shape of a GPT-2: `n_layer` blocks of `n_head` heads and width `n_embd`."""

    n_layer: int
    n_head: int
    n_embd: int
    vocab_size: int
    """Rows of the token table."""
    seq_len: int
    """Rows of the position table."""
    bias: bool = False
    activation: str = "gelu"
    """"gelu", or "gelu_tanh" for its approximation."""
    scale_attn_by_inverse_layer_idx: bool = False
    dropout: float = 0.0


class Attention(nn.Module):
    """Causal self-attention with fused query, key and value projections."""

    def __init__(self, args: GPT2Args) -> None:
        super().__init__()
        self.head_width, self.dropout = args.n_embd // args.n_head, args.dropout
        self.qkv = nn.Linear(args.n_embd, 3 * args.n_embd, bias=args.bias)
        self.proj = nn.Linear(args.n_embd, args.n_embd, bias=args.bias)
        self.attend = CausalAttention()

    def forward(self, x: Tensor, logit_divisor: Tensor | None, sight: Sight | None) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        if logit_divisor is not None:
            q = q / logit_divisor
        dropout = self.dropout if self.training else 0.0
        y = self.attend(q, k, v, sight, dropout)
        return F.dropout(self.proj(y.transpose(1, 2).flatten(2)), self.dropout, self.training)


class MLP(nn.Module):
    """Two layers with a GELU between, four times as wide inside."""

    def __init__(self, args: GPT2Args) -> None:
        super().__init__()
        self.dropout = args.dropout
        self.up = nn.Linear(args.n_embd, 4 * args.n_embd, bias=args.bias)
        self.act = nn.GELU("tanh" if args.activation == "gelu_tanh" else "none")
        self.proj = nn.Linear(4 * args.n_embd, args.n_embd, bias=args.bias)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.proj(self.act(self.up(x))), self.dropout, self.training)


class Block(nn.Module):
    """Attention, then MLP, each on a normalised copy of the residual stream."""

    def __init__(self, args: GPT2Args) -> None:
        super().__init__()
        self.attn_norm = nn.LayerNorm(args.n_embd, bias=args.bias)
        self.attn = Attention(args)
        self.mlp_norm = nn.LayerNorm(args.n_embd, bias=args.bias)
        self.mlp = MLP(args)

    def forward(self, x: Tensor, logit_divisor: Tensor | None, sight: Sight | None) -> Tensor:
        x = x + self.attn(self.attn_norm(x), logit_divisor, sight)
        return x + self.mlp(self.mlp_norm(x))


class GPT2(Model):
    """GPT-2. The token table is also the head."""

    sizes = SIZES
    inputs: ClassVar[tuple[str, ...]] = ("tok_embed", "pos_embed")
    cuts: ClassVar[dict[str, TensorParallelCut]] = {
        "tok_embed": "tokens",
        "pos_embed": "positions",
        "attn.qkv": "fused rows",
        "attn.proj": "columns",
        "mlp.up": "rows",
        "mlp.proj": "columns",
    }

    def __init__(self, args: GPT2Args) -> None:
        super().__init__()
        self.args, self.n_layer, self.head_width = args, args.n_layer, args.n_embd // args.n_head
        self.seq_len, self.width, self.vocab_rows = args.seq_len, args.n_embd, args.vocab_size
        self.heads, self.dropout = (args.n_head, args.n_head), args.dropout
        self.tok_embed = Table(args.vocab_size, args.n_embd)
        self.pos_embed = Table(args.seq_len, args.n_embd)
        self.blocks = nn.ModuleDict({str(number): Block(args) for number in range(args.n_layer)})
        self.norm = nn.LayerNorm(args.n_embd, bias=args.bias)
        self.output = None

    @classmethod
    def from_config(cls, config: ModelConfig, vocab_size: int, seq_len: int) -> Self:
        args = make_args(config, GPT2Args, cls.sizes[config.size], vocab_size, seq_len)
        if args.n_embd % args.n_head:
            raise UserError(
                f"model.n_embd = {args.n_embd} does not divide into model.n_head = {args.n_head} "
                f"heads: choose a multiple of {args.n_head}"
            )
        return cls(args)

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.tok_embed(tokens) + self.pos_embed(positions)
        return F.dropout(x, self.args.dropout, self.training)

    def transform(self, x: Tensor, positions: Tensor, sight: Sight | None) -> Tensor:
        for block, divisor in zip(self.blocks.values(), self._logit_divisors(x.device)):
            x = block(x, divisor, sight)
        return x

    def _logit_divisors(self, device: torch.device) -> list[Tensor] | list[None]:
        """The divisors of attention logits, one for each block that is here."""
        if not self.args.scale_attn_by_inverse_layer_idx:
            return [None] * len(self.blocks)
        # Tensors, so that compiled blocks share one graph; integers, which mixed precision leaves
        # as they are.
        divisors = torch.arange(1, self.args.n_layer + 1, device=device).unbind()
        return [divisors[int(number)] for number in self.blocks]

    def describe(self) -> str:
        args = self.args
        return (
            f"{counted(args.n_layer, 'layer')}, {counted(args.n_head, 'head')}, "
            f"width {args.n_embd}, vocabulary {args.vocab_size}"
        )
