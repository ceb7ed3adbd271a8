"""Models: plain modules that know no parallelism, by the name of their family."""

import torch

from torchmars.config import ModelConfig
from torchmars.models.gpt2 import GPT2
from torchmars.models.llama import Llama
from torchmars.models.model import Model

__all__ = ["MODELS", "Model", "build_meta_model", "build_model"]

MODELS: dict[str, type[Model]] = {"gpt2": GPT2, "llama": Llama}


def build_model(config: ModelConfig, vocab_size: int, seq_len: int) -> Model:
    """Make the model of a config on the current default device, its weights not yet initialised.

    `vocab_size` is the tokenizer's. Raises `UserError` for a shape that cannot be built.
    """
    return MODELS[config.name].from_config(config, vocab_size, seq_len)


def build_meta_model(config: ModelConfig, vocab_size: int, seq_len: int) -> Model:
    """Make the model of a config without memory: its shapes and names.

    Raises `UserError` for a shape that cannot be built.
    """
    with torch.device("meta"):
        return build_model(config, vocab_size, seq_len)
