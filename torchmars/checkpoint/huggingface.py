"""Folders of weights as Hugging Face's transformers reads and writes them."""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path, PurePath
from typing import Any

import torch
from torch import Tensor

from torchmars.checkpoint.weights import (
    SavedWeight,
    weights_of_file,
    weights_problem,
    write_weights,
)
from torchmars.config import ResolvedConfig
from torchmars.config.checkpoint import HF
from torchmars.config.load import config_from_tables
from torchmars.config.toml_files import Tables
from torchmars.core.bounds import Name
from torchmars.core.errors import UserError
from torchmars.core.files import read_text, write_durably
from torchmars.core.typed import parse_json
from torchmars.data.tokenizer import load_tokenizer
from torchmars.models import Model, build_meta_model
from torchmars.models.huggingface import (
    GATE_UP,
    counterparts,
    left_out,
    with_their_parameters,
)
from torchmars.models.huggingface_config import from_config

TOKENIZER = "tokenizer.json"
WEIGHTS, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
LONGEST = 8192  # of the sequences to train on, where a model takes any
FILE_BYTES = 5 * 10**9  # of a file of weights, as transformers divides them
# Buffers that older versions saved beside the weights.
BUFFERS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")


def read_config(folder: Path) -> dict[str, Any]:
    """Return the config.json of a folder. Raises `UserError`."""
    path = folder / CONFIG
    try:
        return parse_json(read_text(path))
    except OSError as error:
        raise UserError(
            f"it is no folder of Hugging Face's: {CONFIG} cannot be read ({error.strerror})"
        ) from None
    except ValueError as error:
        raise UserError(f"its {CONFIG} is no JSON object: {error}") from None


@dataclass(frozen=True)
class FolderModel:
    """A model in a folder of transformers, whose weights are still on the disk."""

    tables: Tables
    """Of a config that trains on from it."""
    config: ResolvedConfig
    model: Model
    """Without memory."""
    weights: dict[str, SavedWeight]
    """Where each weight of `model` lies."""


def is_folder_of_transformers(path: PurePath) -> bool:
    """Return whether `path` is a folder of transformers. A run and a checkpoint are none."""
    return os.path.isfile(path / CONFIG)


def open_folder(folder: Path) -> FolderModel:
    """Open a model in a folder of transformers, for inference or to train on from it.

    Raises `UserError` for a model that is none of ours, for weights other than its config.json
    asks for, and for a tokenizer with more tokens than the model has rows.
    """
    try:
        tables = tables_of(folder)
        config = config_from_tables(tables, f"from {folder / CONFIG}")
        model = build_meta_model(config.model, 1, config.training.seq_len).eval()
        weights = weights_of_folder(folder, model)
        if wrong := weights_problem(weights, model.state_dict()):
            raise UserError(f"it {wrong}")
        tokenizer = load_tokenizer(config.data.tokenizer)
        tokens = max(tokenizer.vocab_size, tokenizer.end_of_text + 1)
        if tokens > model.vocab_rows:
            raise UserError(
                f"its tokenizer has {tokens:,} tokens, its model {model.vocab_rows:,} rows for "
                "them: it is the tokenizer of another model"
            )
    except UserError as error:
        raise UserError(f"{folder} cannot be opened: {error}") from None
    return FolderModel(tables, config, model, weights)


def tables_of(folder: Path) -> Tables:
    """Return the tables of a config that trains on from a folder. Raises `UserError`."""
    model_table = from_config(read_config(folder))
    seq_len = model_table.pop("seq_len")
    if model_table["name"] != "gpt2":  # rotary positions take any length
        seq_len = min(seq_len, LONGEST)
    tables: Tables = {
        "run": {"name": folder.resolve().name},
        "model": model_table,
        "training": {"seq_len": seq_len},
        "checkpoint": {"init_from": f"{HF}{folder.resolve()}"},
    }
    if (folder / TOKENIZER).exists():
        tables["data"] = {"tokenizer": str((folder / TOKENIZER).resolve())}
    return tables


def weights_of_folder(folder: Path, model: Model) -> dict[str, SavedWeight]:
    """Return where the weights of `model` lie in a folder that transformers wrote, by our names.

    Raises `UserError` for one that is missing, and for one that `model` has not.
    """
    files: dict[str, SavedWeight] = {}
    for file in weight_files(folder):
        files |= weights_of_file(file)
    # OpenAI's own GPT-2 was saved without its head, and so without this part of the names.
    bare = not any(name.startswith("transformer.") for name in files)
    fused = any(name.endswith(GATE_UP) for name in files)
    saved = {}
    read = set()
    for ours, there in counterparts(model, fused).items():
        names = [name.removeprefix("transformer.") if bare else name for name in there.names]
        for name in names:
            if name not in files:
                raise UserError(f"it has no {name}, which its {CONFIG} asks for")
        places = [
            replace(files[name], transposed=there.transposed, half=there.half) for name in names
        ]
        for place in places:
            if (place.shape, place.dtype) != (places[0].shape, places[0].dtype):
                raise UserError(f"it has {place.name} in another shape or dtype than expert 0's")
        saved[ours] = replace(places[0], stack=tuple(places)) if there.experts else places[0]
        read.update(names)
    if model.output is None:
        read.add("lm_head.weight")  # the token table once more
    for name in files.keys() - read:
        if not (name.endswith(BUFFERS) or name.startswith(left_out(model))):
            raise UserError(f"it has {name}, which no model of its {CONFIG} has")
    return saved


def weight_files(folder: Path) -> list[Path]:
    """Return the .safetensors files of a folder. Raises `UserError` if there are none."""
    index = folder / INDEX
    if not os.path.lexists(index):
        if os.path.lexists(folder / WEIGHTS):
            return [folder / WEIGHTS]
        raise UserError(
            f"it has no {WEIGHTS}: files of another kind, such as .bin, may run code when "
            "they are read: save the model with safe_serialization"
        )
    try:
        names = sorted(set(parse_json(read_text(index))["weight_map"].values()))
        for name in names:
            Name("file").check(name)
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise UserError(f"its {INDEX} is no index of files beside it ({error})") from None
    return [folder / name for name in names]


def write_weight_files(
    folder: Path,
    model: Model,
    dtype: torch.dtype,
    read: Callable[[str], Tensor],
    file_bytes: int = FILE_BYTES,
) -> None:
    """Write the weights of `model` to files of at most `file_bytes` bytes, and their index.

    A larger tensor has a file of its own. `read` returns a weight by our name. Each is read and
    written before the next one, so that memory holds one, or one stack of experts. They are of
    `dtype`, and buffers as they are: a router chooses by its bias. Raises `OSError`.
    """
    there = with_their_parameters(model)
    theirs, buffers = counterparts(there), dict(there.named_buffers())
    ours, whole = model.state_dict(), there.state_dict()

    def values() -> Iterator[Tensor]:
        for name, tensor in theirs.items():
            weight = read(name) if name in ours else torch.zeros(whole[name].shape)
            yield from weight if tensor.experts else [weight.T if tensor.transposed else weight]
            del weight  # before the next one

    entries = {}
    for name, tensor in theirs.items():
        shape = whole[name].shape[1:] if tensor.experts else whole[name].shape
        kind = whole[name].dtype if name in buffers else dtype
        for each in tensor.names:
            entries[each] = (kind, shape[:: -1 if tensor.transposed else 1])
    sizes = {name: shape.numel() * kind.itemsize for name, (kind, shape) in entries.items()}
    parts = split_by_size(sizes, file_bytes)
    index: dict[str, str] = {}
    rest = values()
    for number, names in enumerate(parts, start=1):
        file = f"model-{number:05d}-of-{len(parts):05d}.safetensors" if len(parts) > 1 else WEIGHTS
        write_weights(
            folder / file, {name: entries[name] for name in names}, islice(rest, len(names))
        )
        index |= dict.fromkeys(names, file)
    if len(parts) > 1:
        table = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": index}
        write_durably(folder / INDEX, json.dumps(table, indent=1) + "\n")


def split_by_size(sizes: Mapping[str, int], most: int) -> list[list[str]]:
    """Return runs of names whose sizes add up to at most `most`; a larger one is alone."""
    runs: list[list[str]] = []
    room = 0
    for name, size in sizes.items():
        if not runs or size > room:
            runs.append([])
            room = most
        runs[-1].append(name)
        room -= size
    return runs
