"""Weights of checkpoints, written for other programs: a folder that appears when it is complete."""

import json
import os
import shutil
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from textwrap import fill
from typing import Literal

import torch
from torch import Tensor

from torchmars.config.load import config_text
from torchmars.config.model_args import Multipliers
from torchmars.core.errors import UserError, file_errors
from torchmars.core.files import PARTIAL, sync_folder, write_durably
from torchmars.data.tokenizer import GENERATION
from torchmars.exchange.families import to_config
from torchmars.exchange.folder import CONFIG
from torchmars.exchange.saved_model import SavedModel
from torchmars.exchange.tokenizer_files import (
    ends_of,
    loading_problem,
    special_tokens,
    tokenizer_files,
)
from torchmars.exchange.weights import FILE_BYTES, tensors_there, write_weights
from torchmars.models import Model
from torchmars.models.deepseek import Deepseek
from torchmars.models.gpt2 import GPT2
from torchmars.models.llama import Llama

Names = Literal["hf", "safetensors"]
CARD = "README.md"
OF_HUB = "library_name: transformers\npipeline_tag: text-generation\n"
TEXT = """---
tags:
- torchmars
{of_hub}---

# {name}

A language model of {parameters}, trained from scratch with torchmars {version}.

- {family}: {shape}
- {tokens:,} tokens in {steps}, validation loss {loss}

It was trained on raw text. It follows no instructions, and repeats what is in that text, right or
wrong. {warning}

```toml
{config}```
"""


def model_card(models: Sequence[SavedModel], warning: str, names: Names) -> str:
    """Return the text of the card of the mean of `models`, with a `warning` of its tokenizer."""
    newest = models[0]
    config, model, loss = newest.config, newest.model, newest.manifest.validation_loss
    mean = f", the mean of {len(models)} checkpoints from step {models[-1].step:,}"
    return TEXT.format(
        of_hub=OF_HUB * (names == "hf"),
        name=config.run.name,
        version=version("torchmars"),
        parameters=model.counts_in_words,
        family=config.model.name,
        shape=model.describe(),
        tokens=newest.manifest.position * config.training.seq_len,
        steps=f"{newest.step:,} steps{mean if len(models) > 1 else ''}",
        loss="not measured" if loss is None else f"{loss:.4f}",
        warning=fill(warning, 100),
        config=config_text(config),
    )


def mean_weight(models: Sequence[SavedModel]) -> Callable[[str], Tensor]:
    """Return a function from a weight's name to its mean over `models`, multipliers folded in."""

    def read(name: str) -> Tensor:
        total = models[0].read(name)
        for model in models[1:]:
            total += model.read(name)
        return folded(models[0].model, name, total.div_(len(models)))

    return read


def folded(model: Model, name: str, weight: Tensor) -> Tensor:
    """Return a weight of `model`, in place, of one without multipliers that computes the same.

    Raises `UserError` for a plugin's model, of which nobody knows what it multiplies where.
    """
    factors, part = model.args.multipliers, name.removesuffix(".weight").removesuffix(".bias")
    if factors != Multipliers() and type(model) not in (GPT2, Llama, Deepseek):
        raise UserError(
            f"a {type(model).__name__} that multiplies ({factors}) cannot be exported without: "
            "take the run as it is (torchmars.load, checkpoint.init_from)"
        )
    # A norm undoes what is before it.
    post_norms = getattr(model.args, "post_norms", False)
    queries = ".attn.q_norm" if getattr(model.args, "qk_norm", False) else ".attn.q"
    if part == "norm":
        weight *= factors.logits
    elif part.endswith(("attn_norm", "mlp_norm") if post_norms else ".proj"):
        weight *= factors.residual
    elif part.endswith(".attn.qkv"):
        weight[: len(weight) // 3] *= factors.attention
    elif part.endswith((queries, ".attn.q_b")):
        weight *= factors.attention
    return weight


def export(
    models: Sequence[SavedModel],
    folder: Path,
    names: Names = "hf",
    dtype: str = "float32",
    file_bytes: int = FILE_BYTES,
) -> None:
    """Write the mean weights of `models` to a folder, in files of at most `file_bytes` bytes.

    `names` says whose: those of transformers, which loads the folder with its tokenizer; or ours,
    and then it has weights alone. Raises `DamagedCheckpoint`, and `UserError` for a shape that no
    class of transformers has, for a tokenizer that is not to be had, and if it cannot be written.
    """
    newest, read = models[0], mean_weight(models)
    texts = texts_of(models, dtype) if names == "hf" else {CARD: model_card(models, "", names)}
    partial = folder.with_name(folder.name + PARTIAL)
    with file_errors(f"cannot write {folder}"):
        if os.path.lexists(partial):
            raise UserError(
                f"{partial} is there, as an export that was cut off leaves it: remove it"
            )
        partial.mkdir(parents=True)
        try:
            for name, text in texts.items():
                write_durably(partial / name, text)
            there = tensors_there(newest.model, getattr(torch, dtype), read, names == "hf")
            write_weights(partial, there, file_bytes)
            sync_folder(partial)
            partial.rename(folder)
        except BaseException:
            shutil.rmtree(partial)  # it may be large
            raise
        sync_folder(folder.parent)


def texts_of(models: Sequence[SavedModel], dtype: str) -> dict[str, str]:
    """Return the texts of all files but the weights, by name."""
    newest = models[0]
    model, config, tokenizer = newest.model, newest.config, newest.tokenizer
    if tokenizer.vocab_size != newest.manifest.vocab_size:
        raise UserError(
            f"data.tokenizer: {config.data.tokenizer} has {tokenizer.vocab_size:,} tokens, that "
            f"of the run had {newest.manifest.vocab_size:,}: put it back"
        )
    special = special_tokens(tokenizer)
    ends = [end for end in ends_of(tokenizer) if end < tokenizer.vocab_size]
    ids = {"bos_token_id": special["bos_token"], "eos_token_id": ends if ends[1:] else ends[0]}
    # Rows past the vocabulary are padding.
    padding = list(range(tokenizer.vocab_size, model.vocab_rows))
    pad = tokenizer.end_of_text if special["pad_token"] is None else special["pad_token"]
    generation = {**ids, "pad_token_id": pad, "suppress_tokens": padding or None}
    # Versions 5 of transformers read `dtype`, earlier ones `torch_dtype`.
    own = ids | dict.fromkeys(("dtype", "torch_dtype"), dtype)
    return {
        CARD: model_card(models, tokenizer_problem(newest), "hf"),
        CONFIG: json.dumps(to_config(model) | own, indent=2) + "\n",
        GENERATION: json.dumps(generation, indent=2) + "\n",
        **tokenizer_files(tokenizer, config.training.seq_len),
    }


def tokenizer_problem(model: SavedModel) -> str:
    """Return how the tokenizer of an exported folder must not be loaded, and how; "" if it may."""
    return loading_problem(model.tokenizer, to_config(model.model)["model_type"])
