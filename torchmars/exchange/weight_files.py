"""Files of weights alone, in the safetensors format: written and read tensor by tensor."""

import json
import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from torchmars.core.errors import UserError
from torchmars.core.files import PARTIAL, DurableFile, open_file, path_problem, sync_folder
from torchmars.optim.tensors import local_intervals, local_part

CHUNK = 2**25  # bytes that are converted at a time
DTYPES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float64: "F64",
}
POINTER = b"version https://git-lfs"  # begins what Git leaves instead of a large file


@dataclass(frozen=True)
class SavedWeight:
    """Where a weight lies: the file, its name and shape there, and whether it is transposed."""

    file: Path
    name: str
    shape_there: tuple[int, ...]
    dtype: str
    """As the format calls it."""
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


def weights_of_file(file: Path) -> dict[str, SavedWeight]:
    """Return where the weights in a .safetensors file lie, by name. Raises `UserError`.

    The library checks that the header describes the whole file, each byte once.
    """
    if wrong := path_problem(file, "file"):
        raise UserError(f"cannot read {file}: {wrong}")
    found = {}
    try:
        with safe_open(file, framework="pt") as saved:
            for name in saved.keys():
                place = saved.get_slice(name)
                found[name] = SavedWeight(file, name, tuple(place.get_shape()), place.get_dtype())
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot read {file}: {no_content(file) or error}") from None
    return found


def no_content(file: Path) -> str:
    """Return why the contents of a file are missing; "" if they may be there."""
    try:
        with open_file(file) as stream:
            begin = stream.read(len(POINTER))
    except OSError:
        return ""
    if begin == POINTER:
        return "it is a pointer of Git LFS, not the file itself: run git lfs pull in its folder"
    return "" if begin else "it is empty: fetch it again"


def weights_problem(saved: Mapping[str, SavedWeight], weights: Mapping[str, Tensor]) -> str:
    """Return which of `weights` cannot be read from `saved`, and why; "" if all can be."""
    for name, place in saved.items():
        if name in weights and place.dtype not in DTYPES.values():
            return f"has {name} as {place.dtype}, where {', '.join(DTYPES.values())} can be read"
    return shape_problem({name: place.shape for name, place in saved.items()}, weights)


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
        if local_part(target).numel():
            read_into(local_part(target), saved[name], local_intervals(target))


def read_into(target: Tensor, place: SavedWeight, part: Sequence[tuple[int, int]]) -> None:
    """Fill `target` with a part of our weight: an interval of each dim. Raises `UserError`."""
    if not place.stack:
        target.copy_(read_part(place, part))
        return
    for matrix, there in zip(target, place.stack[slice(*part[0])], strict=True):
        read_into(matrix, there, part[1:])


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
    file: Path, entries: Mapping[str, tuple[torch.dtype, Sequence[int]]], values: Iterable[Tensor]
) -> None:
    """Write a .safetensors file, durably, whole or not at all.

    `entries` are dtype and shape by name. `values` are the tensors in the same order. They are
    asked for one by one, and converted in chunks: a file needs no more memory than its largest
    tensor and a chunk. The library writes a file from all of its tensors at once. Raises `OSError`,
    and `UserError` if another file has the name of an incomplete one.
    """
    partial, begin, rest = file.with_name(file.name + PARTIAL), header(entries), iter(values)
    if os.path.lexists(partial):
        with open_file(partial) as stream:
            if not begin.startswith(stream.read(len(begin))):
                raise UserError(f"{partial} is there, and no export left it: move it away")
    try:
        with DurableFile(partial) as stream:
            stream.write(begin)
            for dtype, shape in entries.values():
                value = next(rest)  # zip would keep it until it has the next one
                assert value.shape == torch.Size(shape)
                rows = max(1, CHUNK // max(1, value[:1].nbytes))
                for chunk in value.detach().split(rows):
                    flat = chunk.to(dtype).contiguous().view(-1)
                    flat.view(torch.uint8).numpy().tofile(stream)
                del value, chunk, flat  # before the next one
        partial.rename(file)
        sync_folder(file.parent)
    finally:
        partial.unlink(missing_ok=True)


def header(entries: Mapping[str, tuple[torch.dtype, Sequence[int]]]) -> bytes:
    """Return the header of a .safetensors file: names, dtypes, shapes and places of tensors.

    Source: the format's definition in the README of huggingface/safetensors.
    """
    tensors: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name, (dtype, shape) in entries.items():
        end = begin + torch.Size(shape).numel() * dtype.itemsize
        tensors[name] = {
            "dtype": DTYPES[dtype],
            "shape": list(shape),
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(tensors, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text
