"""A user's plugin: a model and an update rule, each with a setting that only it has."""

from dataclasses import dataclass
from typing import Annotated

from torch import nn

from torchmars.config.gpt2 import GPT2Args
from torchmars.config.model import MODELS
from torchmars.core.bounds import Range
from torchmars.models.gpt2 import GPT2, MLP, Attention
from torchmars.optim.rules import RULES
from torchmars.optim.settings import Number


class ParallelBlock(nn.Module):
    """Attention and MLP on the same normalised copy of the residual stream."""

    def __init__(self, args, mlp_scale):
        super().__init__()
        self.norm = nn.LayerNorm(args.n_embd, bias=args.bias)
        self.attn, self.mlp, self.mlp_scale = Attention(args), MLP(args), mlp_scale

    def forward(self, x, logit_divisor, documents):
        y = self.norm(x)
        return x + self.attn(y, logit_divisor, documents) + self.mlp_scale * self.mlp(y)


@dataclass(frozen=True, kw_only=True)
class ParallelArgs(GPT2Args):
    """What such a model is made from."""

    mlp_scale: Annotated[float, Range(0, 100)] = 1.0
    """The factor of the MLP's output."""


class ParallelGPT(GPT2):
    """GPT-2 of parallel blocks."""

    settings = ParallelArgs

    def __init__(self, args):
        super().__init__(args)
        for number in self.blocks:
            self.blocks[number] = ParallelBlock(args, args.mlp_scale)


class ShrinkingMars(type(RULES["mars-adamw"])):
    """MARS-AdamW whose steps also shrink weights."""

    name = "shrinking-mars"
    settings = (
        *RULES["mars-adamw"].settings,
        Number("shrink", "The part of each weight that a step takes away.", 0.0),
    )

    def update(self, group, step):
        super().update(group, step)
        for x in group.weights:
            x.copy_((x * (1 - group.settings["shrink"])).where(step.applied, x))


MODELS["parallel"] = "ours.ParallelGPT"
RULES["shrinking-mars"] = ShrinkingMars()
