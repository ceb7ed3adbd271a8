"""GPT-2 as the published MARS runs trained it: no biases, tied embeddings, pre-norm blocks; dropout where it is asked for.

Source: Radford et al. 2019 for the architecture; Yuan et al. (arXiv 2411.10438) for the settings.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SIZES: dict[str, dict[str, int]] = {
    "nano": {"n_layer": 4, "n_head": 4, "n_embd": 256},
    "small": {"n_layer": 12, "n_head": 12, "n_embd": 768},
    "medium": {"n_layer": 24, "n_head": 16, "n_embd": 1024},
    "large": {"n_layer": 36, "n_head": 20, "n_embd": 1280},
    "xl": {"n_layer": 48, "n_head": 25, "n_embd": 1600},
}


@dataclass(frozen=True)
class GPT2Args:
    """Shape of a GPT-2: `n_layer` blocks of `n_head` heads and width `n_embd`, over at most `seq_len` tokens."""

    n_layer: int
    n_head: int
    n_embd: int
    vocab_size: int
    seq_len: int
    scale_attn_by_inverse_layer_idx: bool = False
    dropout: float = 0.0


class Attention(nn.Module):
    """Causal self-attention with fused query, key and value projections."""

    def __init__(self, args: GPT2Args) -> None:
        super().__init__()
        self.n_head, self.dropout = args.n_head, args.dropout
        self.qkv = nn.Linear(args.n_embd, 3 * args.n_embd, bias=False)
        self.proj = nn.Linear(args.n_embd, args.n_embd, bias=False)

    def forward(self, x: Tensor, logit_divisor: Tensor | None) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.n_head, -1).transpose(1, 2)
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        if logit_divisor is not None:
            q = q / logit_divisor
        y = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, dropout_p=self.dropout if self.training else 0.0
        )
        return F.dropout(
            self.proj(y.transpose(1, 2).reshape(batch, length, width)), self.dropout, self.training
        )


class MLP(nn.Module):
    """Two layers with a GELU between, four times as wide inside."""

    def __init__(self, args: GPT2Args) -> None:
        super().__init__()
        self.dropout = args.dropout
        self.up = nn.Linear(args.n_embd, 4 * args.n_embd, bias=False)
        self.proj = nn.Linear(4 * args.n_embd, args.n_embd, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.proj(F.gelu(self.up(x))), self.dropout, self.training)


class Block(nn.Module):
    """Attention, then MLP, each on a normalised copy of the residual stream."""

    def __init__(self, args: GPT2Args) -> None:
        super().__init__()
        self.attn_norm = nn.LayerNorm(args.n_embd, bias=False)
        self.attn = Attention(args)
        self.mlp_norm = nn.LayerNorm(args.n_embd, bias=False)
        self.mlp = MLP(args)

    def forward(self, x: Tensor, logit_divisor: Tensor | None) -> Tensor:
        x = x + self.attn(self.attn_norm(x), logit_divisor)
        return x + self.mlp(self.mlp_norm(x))


class GPT2(nn.Module):
    """The language model: token ids [batch, length] to logits [batch, length, vocab_size], length <= seq_len."""

    def __init__(self, args: GPT2Args) -> None:
        super().__init__()
        self.args = args
        self.tok_embed = nn.Embedding(args.vocab_size, args.n_embd)
        self.pos_embed = nn.Embedding(args.seq_len, args.n_embd)
        self.blocks = nn.ModuleList(Block(args) for _ in range(args.n_layer))
        self.norm = nn.LayerNorm(args.n_embd, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = F.dropout(
            self.tok_embed(tokens) + self.pos_embed(positions), self.args.dropout, self.training
        )
        divisors: list[Tensor | None] = [None] * len(self.blocks)
        if self.args.scale_attn_by_inverse_layer_idx:
            # Tensors, so that compiled blocks share one graph; integers, which mixed precision leaves as they are.
            divisors = torch.arange(1, len(self.blocks) + 1, device=tokens.device).unbind()
        for block, divisor in zip(self.blocks, divisors):
            x = block(x, divisor)
        return F.linear(self.norm(x), self.tok_embed.weight)

    def init_std(self, name: str) -> float | None:
        """Standard deviation of the initial values of parameter `name`; None for norm weights, which start at 1."""
        if "norm" in name:
            return None
        return 0.02 / math.sqrt(2 * self.args.n_layer) if name.endswith("proj.weight") else 0.02

    def flops_per_token(self) -> int:
        """Floating-point operations of one token's forward and backward pass at full length.

        6 per parameter in a matrix product and 12 L d T for attention (Chowdhery et al. 2022, appendix B).
        """
        matrices = sum(
            p.numel()
            for name, p in self.named_parameters()
            if name != "pos_embed.weight" and p.ndim == 2
        )
        return 6 * matrices + 12 * self.args.n_layer * self.args.n_embd * self.args.seq_len
