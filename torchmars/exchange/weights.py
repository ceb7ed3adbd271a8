"""The weights in folders of Hugging Face's transformers: which files they are in, and where."""

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchmars.config.checkpoint import HF
from torchmars.core.bounds import Name
from torchmars.core.errors import UserError
from torchmars.core.files import read_text, write_durably
from torchmars.core.typed import parse_json
from torchmars.exchange.hub import is_of_hub
from torchmars.exchange.names import (
    GATE_UP,
    Counterpart,
    base_of,
    counterparts,
    left_out,
    with_their_parameters,
)
from torchmars.exchange.weight_files import (
    CHUNK,
    DTYPES,
    SavedWeight,
    no_content,
    read_part,
    weights_of_file,
    write_weights,
)
from torchmars.models import Model
from torchmars.models.gpt2 import GPT2

WEIGHTS, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
ADAPTER = "adapter_config.json"
TABLE, HEAD = "tok_embed.weight", "lm_head.weight"  # our name of the token table, their head
SHARD = re.compile(r"model-\d+-of-\d+\.safetensors")
VARIANT = re.compile(r"model\.[\w-]+(\.index\.json|(-\d+-of-\d+)?\.safetensors)")
FILE_BYTES = 5 * 10**9  # of a file of weights, as transformers divides them
# Buffers that older versions saved beside the weights.
BUFFERS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")


def read_config(folder: Path) -> dict[str, Any]:
    """Return the config.json of a folder. Raises `UserError`."""
    path = folder / CONFIG
    check_folder(folder)
    try:
        return parse_json(read_text(path))
    except OSError as error:
        raise UserError(
            f"it is no folder of Hugging Face's: {CONFIG} cannot be read ({error.strerror})"
        ) from None
    except ValueError as error:
        reason = no_content(path) or error
        raise UserError(f"its {CONFIG} is no JSON object: {reason}") from None


def check_folder(folder: Path) -> None:
    """Raise `UserError` for a folder that is not there, and for one of an adapter."""
    if not os.path.lexists(folder):
        of_hub = f"{HF}{folder}"
        fetch = f": {of_hub} names that model of the hub" if is_of_hub(of_hub) else ""
        raise UserError(f"there is no folder {folder}{fetch}")
    if os.path.lexists(folder / ADAPTER):
        raise UserError(
            f"its {ADAPTER} belongs to an adapter of PEFT: load it there, and save what "
            "merge_and_unload() returns"
        )


def weights_of_folder(folder: Path, model: Model) -> dict[str, SavedWeight]:
    """Return where the weights of `model` lie in a folder that transformers wrote, by our names.

    Raises `UserError` for one that is missing, and for one that `model` has not.
    """
    files, theirs = named_weights(folder, model)
    base, table = base_of(model), theirs[TABLE].name
    read = set()
    if model.output is None and HEAD in files:  # the token table once more
        read.add(HEAD)
        if not same_values(files.setdefault(table, files[HEAD]), files[HEAD]):
            gpt2 = isinstance(model, GPT2)
            remedy = "a GPT-2 here has but one table" if gpt2 else "set model.tied = false"
            raise UserError(f"its {HEAD} has other values than its {table}: {remedy}")
    saved = {}
    for ours, there in theirs.items():
        for name in there.names:
            if name not in files:
                raise UserError(missing(name, files, folder))
        places = [
            replace(files[name], transposed=there.transposed, half=there.half)
            for name in there.names
        ]
        saved[ours] = stacked(places, base) if there.experts else places[0]
        read.update(there.names)
    for name in files.keys() - read:
        whole = base + name.removeprefix(base)
        if not (whole.endswith(BUFFERS) or whole.startswith(left_out(model))):
            raise UserError(f"it has {name}, which no model of its {CONFIG} has{class_of(folder)}")
    return saved


def stacked(experts: Sequence[SavedWeight], base: str) -> SavedWeight:
    """Return the place of a stack whose matrices are a tensor each. Raises `UserError`."""
    first = experts[0]
    for each in experts:
        if each.shape != first.shape:
            raise UserError(f"it has {each.name} in another shape than expert 0's")
        if each.name.startswith(base) != first.name.startswith(base):
            # transformers sorts these names, and so takes one expert for another.
            raise UserError(f"it has {first.name} and {each.name}: experts are named in two ways")
    strange = (each for each in experts if each.dtype not in DTYPES.values())
    return replace(next(strange, first), stack=tuple(experts))


def named_weights(
    folder: Path, model: Model
) -> tuple[dict[str, SavedWeight], dict[str, Counterpart]]:
    """Return where the tensors in a folder lie, by their whole names, and those of `model`.

    As transformers does, a name gets what the base of a model begins it with, or loses it, where
    the model has such a tensor: weights may have been saved without a head. Raises `UserError`.
    """
    files: dict[str, SavedWeight] = {}
    for file in weight_files(folder):
        files |= weights_of_file(file)
    theirs = counterparts(model, any(name.endswith(GATE_UP) for name in files))
    wanted = {HEAD, *(name for there in theirs.values() for name in there.names)}
    base = base_of(model)
    found: dict[str, SavedWeight] = {}
    for name, place in files.items():
        without = name.removeprefix(base)
        whole = next((each for each in (without, base + without) if each in wanted), name)
        if whole in found:
            raise UserError(
                f"it has {found[whole].name} and {name}, which are one weight: take one out"
            )
        found[whole] = place
    return found, theirs


def has_other_head(folder: Path, model: Model) -> bool:
    """Return whether a folder has a head with other values than its token table."""
    files, theirs = named_weights(folder, model)
    places = [files[name] for name in (theirs[TABLE].name, HEAD) if name in files]
    return len(places) == 2 and not same_values(*places)


def missing(name: str, files: Mapping[str, SavedWeight], folder: Path) -> str:
    """Return the fault of a folder without the tensor `name`."""
    known = next((each for each in files if each.endswith(f".{name}")), None)
    if known is None:
        return f"it has no {name}, which its {CONFIG} asks for{class_of(folder)}"
    wrapper = known.removesuffix(name)
    return f"it has no {name}, but {known}: save the model that is in {wrapper.rstrip('.')}"


def class_of(folder: Path) -> str:
    """Return that a folder's config.json names no language model, in words; "" if it names one."""
    if not os.path.isfile(folder / CONFIG):
        return ""
    named = str(read_config(folder).get("architectures"))
    causal = named == "None" or "ForCausalLM" in named or "LMHead" in named
    return "" if causal else f": it was saved from {named.strip('[]')}, which is no language model"


def weight_files(folder: Path) -> list[Path]:
    """Return the .safetensors files of a folder. Raises `UserError` if there are none.

    Of several kinds it is the one that transformers takes: a single file before an index.
    """
    check_folder(folder)
    single, index = folder / WEIGHTS, folder / INDEX
    if os.path.isfile(single) or (os.path.lexists(single) and not os.path.lexists(index)):
        return [single]
    if not os.path.lexists(index):
        raise UserError(f"it has no {WEIGHTS}{other_weights(folder)}")
    try:
        names = sorted(set(parse_json(read_text(index))["weight_map"].values()))
        for name in names:
            Name("file").check(name)
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        reason = no_content(index) or error
        raise UserError(f"its {INDEX} is no index of files beside it ({reason})") from None
    for name in names:
        if not os.path.exists(folder / name):
            raise UserError(f"it has no {name}, which its {INDEX} names: fetch it too")
    return [folder / name for name in names]


def other_weights(folder: Path) -> str:
    """Return which other weights there are instead of the expected ones, and the remedy."""
    names = sorted(path.name for path in folder.iterdir())
    for name in names:
        if SHARD.fullmatch(name):
            return f", and no {INDEX} that says which files there are beside {name}: fetch it too"
        if VARIANT.fullmatch(name):
            kind = name.split(".")[1]
            return f', but {name}: load the model with variant="{kind}" and save it without'
        if name.endswith(".safetensors"):
            return f", but {name}, which transformers does not read: name that file so if it is it"
    return (
        ": files of another kind, such as .bin, may run code when they are read: load the model by "
        "transformers, and save it with safe_serialization"
    )


def same_values(one: SavedWeight, other: SavedWeight) -> bool:
    """Return whether two matrices in files have the same values. Raises `UserError`."""
    if one == other or one.shape != other.shape or {one.dtype, other.dtype} - {*DTYPES.values()}:
        return one.shape == other.shape  # a dtype that cannot be read is told of elsewhere
    rows, *columns = one.shape
    most = max(1, CHUNK // max(1, prod(columns)))
    for begin in range(0, rows, most):
        part = [(begin, min(begin + most, rows)), *((0, size) for size in columns)]
        if not torch.equal(read_part(one, part).float(), read_part(other, part).float()):
            return False
    return True


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
