"""The settings and the named sizes of GPT-2."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from torchmars.config.fields import Mark
from torchmars.config.model_args import ModelArgs, Sizes
from torchmars.core.check import Interval
from torchmars.core.errors import UserError


@dataclass(frozen=True, kw_only=True)
class GPT2Args(ModelArgs):
    """What a GPT-2 is made from."""

    sizes: ClassVar[Sizes] = {
        "nano": {"n_layer": 4, "n_head": 4, "n_embd": 256},
        "small": {"n_layer": 12, "n_head": 12, "n_embd": 768},
        "medium": {"n_layer": 24, "n_head": 16, "n_embd": 1024},
        "large": {"n_layer": 36, "n_head": 20, "n_embd": 1280},
        "xl": {"n_layer": 48, "n_head": 25, "n_embd": 1600},
    }
    grows: ClassVar[tuple[str, ...]] = ("n_embd", "n_head")

    n_layer: Annotated[int, Interval(ge=1, le=1_000)]
    """Number of blocks."""
    n_head: Annotated[int, Interval(ge=1, le=10_000)]
    """Attention heads of each block."""
    n_embd: Annotated[int, Interval(ge=1, le=1_000_000)]
    """Width."""
    bias: bool = False
    """Biases in layers and norms, as OpenAI's weights have and the MARS runs had not."""
    activation: Literal["gelu", "gelu_tanh"] = "gelu"
    """The function between the layers of an MLP. gelu_tanh: the approximation that OpenAI's weights
    were trained with."""
    scale_attn_by_inverse_layer_idx: bool = False
    """Divide attention logits also by the block's number, counted from 1. The published MARS runs
    did."""
    dropout: Annotated[float, Interval(ge=0, le=0.99), Mark.CHANGEABLE] = 0.0
    """Probability of dropout on embeddings, attention and both outputs of a block in training."""

    def check(self) -> None:
        if self.n_embd % self.n_head:
            raise UserError(
                f"model.n_embd = {self.n_embd} does not divide into model.n_head = {self.n_head} "
                f"heads: choose a multiple of {self.n_head}"
            )
