"""A family of models in one file, as a plugin may have it: no positions, and squared ReLUs."""

from dataclasses import dataclass
from typing import Annotated

import torch.nn.functional as F
from annotated_types import Interval
from torch import nn

from torchmars import register
from torchmars.config.model import MODELS
from torchmars.config.model_args import ModelArgs
from torchmars.models.attention import CausalAttention
from torchmars.models.model import Head, Model, Table, added


@dataclass(frozen=True, kw_only=True)
class PlainArgs(ModelArgs):
    """What such a model is made from."""

    sizes = {"tiny": {"n_layer": 2, "n_head": 4, "width": 32}}
    grows = ("width", "n_head")

    n_layer: Annotated[int, Interval(ge=1, le=100)]
    """Number of blocks."""
    n_head: Annotated[int, Interval(ge=1, le=100)]
    """Attention heads of each block."""
    width: Annotated[int, Interval(ge=1, le=10_000)]
    """Size of a hidden state."""
    mlp_ratio: Annotated[int, Interval(ge=1, le=16)] = 4
    """How many times as wide as the model its MLPs are inside."""


class Attention(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.head_width = args.width // args.n_head
        self.q, self.k, self.v, self.proj = (
            nn.Linear(args.width, args.width, bias=False) for _ in range(4)
        )
        self.attend = CausalAttention(args.multipliers.attention_scale(self.head_width))

    def forward(self, x, sight):
        q, k, v = (
            layer(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        return self.proj(self.attend(q, k, v, sight).transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.up = nn.Linear(args.width, args.mlp_ratio * args.width, bias=False)
        self.proj = nn.Linear(args.mlp_ratio * args.width, args.width, bias=False)

    def forward(self, x):
        return self.proj(F.relu(self.up(x)).square())


class Block(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.attn_norm, self.mlp_norm = nn.RMSNorm(args.width), nn.RMSNorm(args.width)
        self.attn, self.mlp = Attention(args), MLP(args)
        self.residual = args.multipliers.residual

    def forward(self, x, sight):
        x = added(x, self.attn(self.attn_norm(x), sight), self.residual)
        return added(x, self.mlp(self.mlp_norm(x)), self.residual)


class Plain(Model):
    """A model of the family."""

    settings = PlainArgs
    inputs = ("tok_embed",)
    multipliers = ("logits", "residual", "attention")
    cuts = {"tok_embed": "tokens", "output": "rows", "mlp.up": "rows"}
    cuts |= {"attn.q": "rows", "attn.k": "rows", "attn.v": "rows"}
    cuts |= {"attn.proj": "columns", "mlp.proj": "columns"}

    def __init__(self, args):
        super().__init__(args)
        self.n_layer, self.width, self.heads = args.n_layer, args.width, (args.n_head, args.n_head)
        self.head_width = args.width // args.n_head
        self.tok_embed = Table(args.vocab_size, args.width)
        self.blocks = nn.ModuleDict({str(number): Block(args) for number in range(args.n_layer)})
        self.norm = nn.RMSNorm(args.width)
        self.output = Head(args.width, args.vocab_size)

    def embed(self, tokens, positions):
        return self.tok_embed(tokens)

    def transform(self, x, positions, sight):
        for block in self.blocks.values():
            x = block(x, sight)
        return x

    def describe(self):
        return f"{self.n_layer} layers, width {self.width}, MLPs {self.args.mlp_ratio} times that"


register(MODELS, "plain", Plain)
