"""GPT-2, by default as the published MARS runs trained it.

- Learned positions. The token table is also the head.
- Query, key and value are one fused weight; a rank of tensor parallelism has consecutive rows.
- By default no biases, no dropout and the exact GELU. OpenAI's weights need `bias` and "gelu_tanh".
- `scale_attn_by_inverse_layer_idx` divides the attention logits of layer n (from 1) by n.

Sources: Radford et al. 2019 for the architecture; Yuan et al. (arXiv 2411.10438) for the settings.
"""

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchmars.config.gpt2 import GPT2Args
from torchmars.config.model_args import Multipliers
from torchmars.core.words import counted
from torchmars.models.attention import CausalAttention, Sight
from torchmars.models.model import Model, Table, TensorParallelCut, added


class Attention(nn.Module):
    """Causal self-attention with fused query, key and value projections."""

    def __init__(self, args: GPT2Args) -> None:
        super().__init__()
        self.head_width, self.dropout = args.n_embd // args.n_head, args.dropout
        self.qkv = nn.Linear(args.n_embd, 3 * args.n_embd, bias=args.bias)
        self.proj = nn.Linear(args.n_embd, args.n_embd, bias=args.bias)
        self.attend = CausalAttention(args.multipliers.attention_scale(self.head_width))
        self.head_rows = {"qkv": 3 * args.n_head}
        self.logit_rows = {
            "qkv": [kind for kind in ("query", "key", "") for _ in range(args.n_head)]
        }

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
        self.residual = args.multipliers.residual
        self.attn_norm = nn.LayerNorm(args.n_embd, bias=args.bias)
        self.attn = Attention(args)
        self.mlp_norm = nn.LayerNorm(args.n_embd, bias=args.bias)
        self.mlp = MLP(args)

    def forward(self, x: Tensor, logit_divisor: Tensor | None, sight: Sight | None) -> Tensor:
        x = added(x, self.attn(self.attn_norm(x), logit_divisor, sight), self.residual)
        return added(x, self.mlp(self.mlp_norm(x)), self.residual)


class GPT2(Model):
    """GPT-2. The token table is also the head."""

    settings = GPT2Args
    multipliers: ClassVar[tuple[str, ...]] = Multipliers._fields
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
        super().__init__(args)
        self.n_layer, self.width, self.head_width = (
            args.n_layer,
            args.n_embd,
            args.n_embd // args.n_head,
        )
        self.heads, self.dropout = (args.n_head, args.n_head), args.dropout
        self.tok_embed = Table(args.vocab_size, args.n_embd)
        self.pos_embed = Table(args.seq_len, args.n_embd)
        self.blocks = nn.ModuleDict({str(number): Block(args) for number in range(args.n_layer)})
        self.norm = nn.LayerNorm(args.n_embd, bias=args.bias)
        self.output = None

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
