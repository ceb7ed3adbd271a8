"""Which model is trained."""

from dataclasses import dataclass
from typing import Annotated, Literal

from torchmars.config.fields import Mark
from torchmars.core.bounds import Range


@dataclass(frozen=True)
class ModelConfig:
    """Which model is trained."""

    name: Annotated[Literal["gpt2"], Mark.IDENTITY] = "gpt2"
    """Model family."""
    size: Annotated[Literal["nano", "small", "medium", "large", "xl"], Mark.IDENTITY] = "nano"
    """Named size: nano (3M, for CPUs), small (124M), medium (354M), large (773M), xl (1.6B)."""
    n_layer: Annotated[Annotated[int, Range(1, 1_000)] | None, Mark.IDENTITY] = None
    """Number of blocks, instead of the named size's."""
    n_head: Annotated[Annotated[int, Range(1, 10_000)] | None, Mark.IDENTITY] = None
    """Attention heads of each block, instead of the named size's."""
    n_embd: Annotated[Annotated[int, Range(1, 1_000_000)] | None, Mark.IDENTITY] = None
    """Width, instead of the named size's."""
    vocab_size: Annotated[Annotated[int, Range(1, 10_000_000)] | None, Mark.IDENTITY] = None
    """Rows of the token table. Default: the tokenizer's vocabulary, rounded up to a multiple of
    64."""
    scale_attn_by_inverse_layer_idx: Annotated[bool, Mark.IDENTITY] = False
    """Divide attention logits also by the block's number, counted from 1. The published MARS runs
    did."""
    dropout: Annotated[float, Range(0, 0.99)] = 0.0
    """Probability of dropout on embeddings, attention and both outputs of a block in training."""
