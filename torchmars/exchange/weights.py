"""Files of weights alone, in the safetensors format: which there are, what is where, and new ones.

A folder has one file, or several and an index, as transformers writes them: under its names of
tensors, or under ours.
"""

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from torchmars.core.check import Name, parse_json
from torchmars.core.errors import UserError
from torchmars.core.files import path_problem, read_bytes, read_text, write_durably
from torchmars.exchange.families import counterparts, family_of
from torchmars.exchange.family import Counterpart
from torchmars.exchange.llama_family import GATE_UP
from torchmars.models import Model
from torchmars.optim.tensors import local_intervals, local_part

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
TABLE, HEAD = "tok_embed.weight", "lm_head.weight"  # our name of the token table, their head
FILE_BYTES = 5 * 10**9  # of a file of weights, as transformers divides them
SMALL = 1024  # bytes, more than a pointer of Git LFS has
DTYPES = "F32, BF16, F16, F64"  # as the format calls them
# Buffers that older versions saved beside the weights.
BUFFERS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")
# What may be there instead, and how to come by what can be read. The first counts.
OTHERS = {
    r"adapter_config\.json": "of an adapter of PEFT: load it there, and save what "
    "merge_and_unload() returns",
    r"model-\d+-of-\d+\.safetensors": f"and no {INDEX}: fetch it",
    r"consolidated\..*|params\.json": "of those who trained the model: fetch their folder for "
    "transformers, which has a config.json",
    r".*\.distcp|pytorch_model_fsdp_\d+": "of FSDP's ranks: accelerate merge-weights FOLDER OUT "
    "writes one file of them, and python -m torch.distributed.checkpoint.format_utils dcp_to_torch "
    "one to load and save_pretrained",
    r"global_step\d+|zero_to_fp32\.py": "of DeepSpeed's ranks: python zero_to_fp32.py FOLDER OUT "
    "--safe_serialization writes files of weights",
    r".*\.(safetensors|bin|pth?|ckpt|pkl)": "which is not read (a pickle may run code): load the "
    "model by transformers, with its variant= if it has one, and save it by save_pretrained",
}


class OtherHead(UserError):
    """A head beside a tied token table, with other values."""


@dataclass(frozen=True)
class SavedWeight:
    """Where a weight lies: the file, its name and shape there, and whether it is transposed."""

    file: Path
    name: str
    shape_there: tuple[int, ...]
    transposed: bool = False
    half: int | None = None
    """Which half of the rows of each matrix it is, where two stacks are one tensor there."""
    stack: tuple["SavedWeight", ...] = ()
    """Where the matrices of a stack lie, if each is a tensor there; the rest is the first one's."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of our weight."""
        if self.stack:
            return (len(self.stack), *self.stack[0].shape)
        if self.half is not None and len(self.shape_there) == 3 and self.shape_there[1] % 2 == 0:
            stack, rows, columns = self.shape_there
            return (stack, rows // 2, columns)
        return self.shape_there[:: -1 if self.transposed else 1]


def has_weights(folder: Path) -> bool:
    """Return whether there is a file of weights, or an index of some, in a folder."""
    return any(os.path.lexists(folder / name) for name in (WEIGHTS, INDEX))


def no_weights(folder: Path) -> UserError:
    """Return the error of a folder without: what is there instead, and the remedy."""
    names = sorted(os.listdir(folder)) if folder.is_dir() else []
    for pattern, remedy in OTHERS.items():
        if found := next((name for name in names if re.fullmatch(pattern, name)), None):
            return UserError(f"it has no {WEIGHTS}, but {found}, {remedy}")
    return UserError(f"it has no {WEIGHTS}: fetch it")


def weights_in(folder: Path) -> dict[str, SavedWeight]:
    """Return where the weights in a folder lie, by their names there. Raises `UserError`.

    Of a single file and an index it is the file that counts, as in transformers.
    """
    single, index = folder / WEIGHTS, folder / INDEX
    if os.path.isfile(single) or not os.path.lexists(index):
        return weights_of_file(single)
    try:
        names = sorted(set(parse_json(read_text(index))["weight_map"].values()))
        for name in names:
            Name().check(name)
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise UserError(f"its {INDEX} is no index of files beside it ({error})") from None
    found: dict[str, SavedWeight] = {}
    for name in names:
        if not os.path.exists(folder / name):
            raise UserError(f"it has no {name}, which its {INDEX} names: fetch it too")
        found |= weights_of_file(folder / name)
    return found


def weights_of_file(file: Path) -> dict[str, SavedWeight]:
    """Return where the weights in a .safetensors file lie, by name. Raises `UserError`.

    The library checks that the header describes the whole file, each byte once.
    """
    if wrong := path_problem(file, "file"):
        raise UserError(f"cannot read {file}: {wrong}")
    found = {}
    try:
        if file.stat().st_size < SMALL:
            read_bytes(file)  # it tells a pointer of Git LFS
        with safe_open(file, framework="pt") as saved:
            for name in saved.keys():
                place = saved.get_slice(name)
                dtype = place.get_dtype()
                if dtype not in DTYPES.split(", ") and not name.endswith(BUFFERS):
                    raise UserError(f"{file} has {name} as {dtype}, where {DTYPES} can be read")
                found[name] = SavedWeight(file, name, tuple(place.get_shape()))
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot read {file}: {error}") from None
    return found


def weights_of_folder(folder: Path, model: Model) -> dict[str, SavedWeight]:
    """Return where the weights of `model` lie in a folder that transformers wrote, by our names.

    As there, a name gets what begins names of its family, or loses it, where that fits: weights may
    have been saved without a head. Raises `UserError` for one too many or too few.
    """
    there, base = weights_in(folder), family_of(model).base
    theirs = counterparts(model, any(name.endswith(GATE_UP) for name in there))
    wanted = {HEAD, *(name for each in theirs.values() for name in each.names)}
    files: dict[str, SavedWeight] = {}
    for name, place in there.items():
        without = name.removeprefix(base)
        whole = next((each for each in (without, base + without) if each in wanted), name)
        if other := files.get(whole):
            raise UserError(f"it has {other.name} and {name}, which are one weight: take one out")
        files[whole] = place
    if model.output is None and HEAD in files:  # the token table once more
        head, table = files.pop(HEAD), theirs[TABLE].name
        if not same_values(files.setdefault(table, head), head):
            can_untie = hasattr(model.args, "tied")
            remedy = "set model.tied = false" if can_untie else "a GPT-2 here has but one table"
            raise OtherHead(f"its {HEAD} has other values than its {table}: {remedy}")
    saved = {}
    for ours, each in theirs.items():
        for name in each.names:
            if name not in files:
                inside = [other for other in files if other.endswith(f".{name}")]
                module = "".join(inside[:1]).removesuffix(f".{name}")
                remedy = f": save the model that is in {module}" if module else ""
                raise UserError(f"it has no {name}, which its config.json asks for{remedy}")
        places = [
            replace(files[name], transposed=each.transposed, half=each.half) for name in each.names
        ]
        if any(place.shape != places[0].shape for place in places):
            raise UserError(f"it has an expert of another shape than {places[0].name}")
        saved[ours] = replace(places[0], stack=tuple(places)) if each.experts else places[0]
    left_out = family_of(model).left_out(model)
    for name in files.keys() - wanted:
        whole = base + name.removeprefix(base)
        if not whole.endswith(BUFFERS) and not whole.startswith(left_out):
            raise UserError(f"it has {name}, which no model of its config.json has")
    return saved


def same_values(one: SavedWeight, other: SavedWeight) -> bool:
    """Return whether two matrices in files have the same values. Raises `UserError`."""
    if one == other or one.shape != other.shape:
        return one == other
    whole = [(0, size) for size in one.shape]
    return torch.equal(read_part(one, whole).float(), read_part(other, whole).float())


def shape_problem(saved: Mapping[str, tuple[int, ...]], weights: Mapping[str, Tensor]) -> str:
    """Return which of `weights` is not among the shapes `saved`, or another; "" if none is."""
    for name, value in weights.items():
        if saved.get(name) != tuple(value.shape):
            found = f"in shape {list(saved[name])}" if name in saved else "not at all"
            return f"has {name} {found}, the config's model in {list(value.shape)}"
    return ""


@torch.no_grad()
def load_weights(saved: Mapping[str, SavedWeight], weights: Mapping[str, Tensor]) -> None:
    """Fill `weights`, sharded or not, with those that `saved` names. Raises `UserError`.

    Every rank reads its own part only.
    """
    for name, target in weights.items():
        local, place, part = local_part(target), saved[name], local_intervals(target)
        if local.numel() and place.stack:
            for matrix, each in zip(local, place.stack[slice(*part[0])], strict=True):
                matrix.copy_(read_part(each, part[1:]))
        elif local.numel():
            local.copy_(read_part(place, part))


def read_part(place: SavedWeight, part: Sequence[tuple[int, int]]) -> Tensor:
    """Return a part of our weight that is one tensor there. Raises `UserError`."""
    slices = [slice(*interval) for interval in part]
    if place.half is not None:
        begin = place.half * place.shape[1]
        slices[1] = slice(begin + slices[1].start, begin + slices[1].stop)
    try:
        with safe_open(place.file, framework="pt") as saved:
            order = -1 if place.transposed else 1
            there: Tensor = saved.get_slice(place.name)[tuple(slices[::order])]
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot read {place.file}: {error}") from None
    return there.T if place.transposed else there


def write_weights(
    folder: Path, tensors: Iterable[tuple[str, Tensor]], file_bytes: int = FILE_BYTES
) -> None:
    """Write named tensors to a file, or to several of at most `file_bytes` bytes, and their index.

    A larger tensor has a file of its own. Memory holds the tensors of a file. Raises `OSError`.
    """
    parts: list[list[str]] = []
    total = 0
    for held in by_file(tensors, file_bytes):
        file = folder / f"{len(parts)}.safetensors"
        try:
            save_file(held, file, {"format": "pt"})
        except SafetensorError as error:
            raise OSError(str(error)) from None
        file.chmod(folder.stat().st_mode & 0o666)  # the library's are for their owner alone
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
        parts.append([*held])
        total += sum(tensor.nbytes for tensor in held.values())
    index: dict[str, str] = {}
    for number, names in enumerate(parts):
        name = f"model-{number + 1:05d}-of-{len(parts):05d}.safetensors"
        name = WEIGHTS if len(parts) == 1 else name
        (folder / f"{number}.safetensors").rename(folder / name)
        index |= dict.fromkeys(names, name)
    if len(parts) > 1:
        table = {"metadata": {"total_size": total}, "weight_map": index}
        write_durably(folder / INDEX, json.dumps(table, indent=1) + "\n")


def by_file(tensors: Iterable[tuple[str, Tensor]], most: int) -> Iterator[dict[str, Tensor]]:
    """Yield the tensors of each file; they are gone when the next one is asked for."""
    held: dict[str, Tensor] = {}
    for name, tensor in tensors:
        if held and sum(each.nbytes for each in held.values()) + tensor.nbytes > most:
            yield held
            held.clear()
        held[name] = tensor
    yield held


def tensors_there(
    model: Model, dtype: torch.dtype, read: Callable[[str], Tensor], theirs: bool = True
) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of `model` by their names in transformers, or else by our own.

    `read` returns a weight by our name. Buffers keep their dtype: a router chooses by its bias.
    """
    there = family_of(model).with_their_parameters(model) if theirs else model
    ours, buffers = model.state_dict(), dict(there.named_buffers())
    shapes = {name: value.shape for name, value in there.state_dict().items()}
    places = counterparts(there) if theirs else {name: Counterpart(name) for name in shapes}
    for name, place in places.items():
        weight = read(name) if name in ours else torch.zeros(shapes[name])
        weight = weight if name in buffers else weight.to(dtype)
        matrices = [*weight] if place.experts else [weight.T if place.transposed else weight]
        yield from zip(place.names, (each.contiguous() for each in matrices))
