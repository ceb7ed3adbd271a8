"""Models: plain `nn.Module`s that know no parallelism, and the registry of their named sizes."""

import torch

from torchmars.config import ModelConfig
from torchmars.core.errors import UserError
from torchmars.models.gpt2 import GPT2, SIZES, GPT2Args

__all__ = ["GPT2", "GPT2Args", "build_meta_model", "build_model", "model_args"]


def model_args(config: ModelConfig, vocab_size: int, seq_len: int) -> GPT2Args:
    """The shape of the model that `config` asks for, for a tokenizer of `vocab_size` tokens.

    Raises `UserError` for a shape that cannot be built and for a token table smaller than the vocabulary in use.
    """
    n_layer, n_head, n_embd = (
        getattr(config, key) or SIZES[config.size][key] for key in ("n_layer", "n_head", "n_embd")
    )
    if n_embd % n_head:
        raise UserError(
            f"model.n_embd = {n_embd} does not divide into model.n_head = {n_head} heads: "
            f"choose a multiple of {n_head}"
        )
    rows = config.vocab_size or -(-vocab_size // 64) * 64
    return GPT2Args(
        n_layer=n_layer,
        n_head=n_head,
        n_embd=n_embd,
        vocab_size=rows,
        seq_len=seq_len,
        scale_attn_by_inverse_layer_idx=config.scale_attn_by_inverse_layer_idx,
        dropout=config.dropout,
    )


def build_model(args: GPT2Args) -> GPT2:
    """The model on the current default device, its weights not yet initialised."""
    return GPT2(args)


def build_meta_model(config: ModelConfig, vocab_size: int, seq_len: int) -> GPT2:
    """The model without memory, for a tokenizer of `vocab_size` tokens: its shapes and names. Raises `UserError` for a shape that cannot be built."""
    with torch.device("meta"):
        return build_model(model_args(config, vocab_size, seq_len))
