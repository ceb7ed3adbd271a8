"""Weights of checkpoints, written for other programs: a folder that appears when it is complete."""

import json
import shutil
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from torchmars.config.load import config_text
from torchmars.config.model_args import Multipliers
from torchmars.core.errors import UserError, file_errors
from torchmars.core.files import PARTIAL, sync_folder, write_durably
from torchmars.data.tokenizer import GENERATION
from torchmars.exchange.families import to_config
from torchmars.exchange.saved_model import CONFIG, SavedModel
from torchmars.exchange.tokenizer_files import special_tokens, tokenizer_files
from torchmars.exchange.weights import FILE_BYTES, tensors_there, write_weights
from torchmars.models import Model
from torchmars.models.deepseek import Deepseek
from torchmars.models.gpt2 import GPT2
from torchmars.models.llama import Llama

Names = Literal["hf", "safetensors"]
SETTINGS = "torchmars.toml"  # the config of the run


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
    saved: SavedModel,
    folder: Path,
    names: Names = "hf",
    dtype: str = "float32",
    file_bytes: int = FILE_BYTES,
) -> None:
    """Write the weights of a model to a folder, in files of at most `file_bytes` bytes.

    `names` says whose: those of transformers, which loads the folder with its tokenizer; or ours,
    and then it has weights alone. Raises `DamagedCheckpoint`, and `UserError` for a shape that no
    class of transformers has, for a tokenizer that is not to be had, and if it cannot be written.
    """
    texts = texts_of(saved, dtype) if names == "hf" else {}
    texts[SETTINGS] = config_text(saved.config)
    partial = folder.with_name(folder.name + PARTIAL)

    def read(name: str) -> Tensor:
        return folded(saved.model, name, saved.read(name))

    with file_errors(f"cannot write {partial}", "remove it if an export that was cut off left it"):
        partial.mkdir(parents=True)
    with file_errors(f"cannot write {folder}"):
        try:
            for name, text in texts.items():
                write_durably(partial / name, text)
            there = tensors_there(saved.model, getattr(torch, dtype), read, names == "hf")
            write_weights(partial, there, file_bytes)
            sync_folder(partial)
            partial.rename(folder)
        except BaseException:
            shutil.rmtree(partial)  # it may be large
            raise
        sync_folder(folder.parent)


def texts_of(saved: SavedModel, dtype: str) -> dict[str, str]:
    """Return the texts of all files but the weights, by name."""
    model, config, tokenizer = saved.model, saved.config, saved.tokenizer
    special = special_tokens(tokenizer)
    ends = [end for end in tokenizer.ends if end < tokenizer.vocab_size]
    ids = {"bos_token_id": special["bos_token"], "eos_token_id": ends if ends[1:] else ends[0]}
    # Rows past the vocabulary are padding.
    padding = list(range(tokenizer.vocab_size, model.vocab_rows))
    pad = tokenizer.end_of_text if special["pad_token"] is None else special["pad_token"]
    generation = {**ids, "pad_token_id": pad, "suppress_tokens": padding or None}
    # Versions 5 of transformers read `dtype`, earlier ones `torch_dtype`.
    own = ids | dict.fromkeys(("dtype", "torch_dtype"), dtype)
    return {
        CONFIG: json.dumps(to_config(model) | own, indent=2) + "\n",
        GENERATION: json.dumps(generation, indent=2) + "\n",
        **tokenizer_files(tokenizer, config.training.seq_len),
    }
