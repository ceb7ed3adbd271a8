"""A user's plugin: a model and an update rule, each with a setting that only it has."""

from torch import nn

from torchmars.config.model import MODELS
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


class ParallelGPT(GPT2):
    """GPT-2 of parallel blocks."""

    extra = ("mlp_scale",)

    @classmethod
    def from_config(cls, config, vocab_size, seq_len):
        model = super().from_config(config, vocab_size, seq_len)
        for number in model.blocks:
            model.blocks[number] = ParallelBlock(model.args, config.extra["mlp_scale"])
        return model


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
