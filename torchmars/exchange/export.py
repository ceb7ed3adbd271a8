"""Weights of checkpoints, written for other programs."""

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from torchmars.config.model_args import Multipliers
from torchmars.core.errors import UserError, file_errors
from torchmars.core.files import PARTIAL, read_bytes, sync_folder, write_durably
from torchmars.data.tokenizer import GENERATION
from torchmars.exchange.card import HEAD, model_card
from torchmars.exchange.saved_model import SavedModel, tokenizer_of
from torchmars.exchange.to_config import to_config
from torchmars.exchange.tokenizer_files import (
    ends_of,
    loading_problem,
    special_tokens,
    tokenizer_files,
)
from torchmars.exchange.weight_files import write_weights
from torchmars.exchange.weights import CONFIG, FILE_BYTES, write_weight_files
from torchmars.models import Model
from torchmars.models.deepseek import Deepseek
from torchmars.models.gpt2 import GPT2
from torchmars.models.llama import Llama

CARD = "README.md"
FILE = re.compile(
    r"README\.md|((tokenizer|config|generation_config|tokenizer_config)\.json|model.*)(\.partial)?"
)


def mean_weight(models: Sequence[SavedModel]) -> Callable[[str], Tensor]:
    """Return a function from a weight's name to its mean over `models`, multipliers folded in.

    What is written computes the same without any ([transfer]). It holds two tensors of that weight
    in memory, no more.
    """

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


def export(models: Sequence[SavedModel], target: Path, kind: str, dtype: str) -> None:
    """Write the mean weights of `models`: "hf", a folder, or a file. Raises `UserError`."""
    write = export_folder if kind == "hf" else export_file
    with file_errors(f"cannot write {target}"):
        write(models, target, getattr(torch, dtype))


def export_file(models: Sequence[SavedModel], file: Path, dtype: torch.dtype) -> None:
    """Write the mean weights of `models`, under our names, to a .safetensors file.

    Raises `OSError` and `DamagedCheckpoint`.
    """
    state, buffers = models[0].model.state_dict(), dict(models[0].model.named_buffers())
    entries = {
        name: (value.dtype if name in buffers else dtype, value.shape)
        for name, value in state.items()
    }
    write_weights(file, entries, map(mean_weight(models), state))


def export_folder(
    models: Sequence[SavedModel], folder: Path, dtype: torch.dtype, file_bytes: int = FILE_BYTES
) -> None:
    """Write the mean weights of `models`, and their tokenizer, to a folder that transformers loads.

    It appears when it is complete. `file_bytes` is the size of its files of weights at most. Raises
    `OSError`, `DamagedCheckpoint`, and `UserError` for a shape that no class of transformers has,
    and for a tokenizer that is not to be had.
    """
    newest = models[0]
    texts = texts_of(models, dtype)
    partial = folder.with_name(folder.name + PARTIAL)
    if os.path.lexists(partial):
        if not is_cut_off(partial):
            raise UserError(f"{partial} is there, and no export left it: move it away")
        remove_export(partial)
    partial.mkdir(parents=True)
    try:
        for name, text in texts.items():
            write_durably(partial / name, text)
        write_weight_files(partial, newest.model, dtype, mean_weight(models), file_bytes)
        sync_folder(partial)
        partial.rename(folder)
    except BaseException:
        remove_export(partial)  # it may be large
        raise
    sync_folder(folder.parent)


def is_cut_off(partial: Path) -> bool:
    """Return whether an export that was cut off left `partial`: only files of one, with its card.

    Raises `OSError`.
    """
    if partial.is_symlink() or not partial.is_dir():
        return False
    files = {path.name: path.is_file() for path in partial.iterdir()}
    if files.keys() <= {CARD + PARTIAL}:  # the card comes first
        return True
    known = all(file and FILE.fullmatch(name) for name, file in files.items())
    return known and CARD in files and read_bytes(partial / CARD).startswith(HEAD.encode())


def remove_export(partial: Path) -> None:
    """Delete an export that is not complete; last its card, by which it is known."""
    for path in sorted(partial.iterdir(), key=lambda path: path.name == CARD):
        path.unlink()
    partial.rmdir()


def texts_of(models: Sequence[SavedModel], dtype: torch.dtype) -> dict[str, str]:
    """Return the texts of all files but the weights, by name, its card first.

    Raises `UserError`.
    """
    newest = models[0]
    model, config = newest.model, newest.config
    tokenizer = tokenizer_of(newest)
    if tokenizer.vocab_size != newest.manifest.vocab_size:
        raise UserError(
            f"data.tokenizer: {config.data.tokenizer} has {tokenizer.vocab_size:,} tokens, that "
            f"of the run had {newest.manifest.vocab_size:,}: put it back"
        )
    special = special_tokens(tokenizer)
    ends = [end for end in ends_of(tokenizer) if end < tokenizer.vocab_size]
    ids = {
        "bos_token_id": special["bos_token"],
        "eos_token_id": ends if len(ends) > 1 else ends[0],
    }
    # Rows past the vocabulary are padding.
    padding = list(range(tokenizer.vocab_size, model.vocab_rows))
    pad = tokenizer.end_of_text if special["pad_token"] is None else special["pad_token"]
    generation = {**ids, "pad_token_id": pad, "suppress_tokens": padding or None}
    kind = str(dtype).removeprefix("torch.")
    # Versions 5 of transformers read `dtype`, earlier ones `torch_dtype`.
    own = {**ids, "dtype": kind, "torch_dtype": kind}
    return {
        CARD: model_card(models, tokenizer_problem(newest)),
        CONFIG: to_json(to_config(model) | own),
        GENERATION: to_json(generation),
        **tokenizer_files(tokenizer, config.training.seq_len),
    }


def tokenizer_problem(model: SavedModel) -> str:
    """Return how the tokenizer of an exported folder must not be loaded, and how; "" if it may."""
    return loading_problem(tokenizer_of(model), to_config(model.model)["model_type"])


def to_json(value: Mapping[str, object]) -> str:
    """Return the text of a JSON file."""
    return json.dumps(value, indent=2) + "\n"
