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
from torchmars.core.files import PARTIAL, sync_folder
from torchmars.optim.tensors import local_intervals, local_part

DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


@dataclass(frozen=True)
class SavedWeight:
    """Where a weight lies: the file, its name and shape there, and whether it is transposed."""

    file: Path
    name: str
    shape_there: tuple[int, ...]
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of our weight."""
        return self.shape_there[:: -1 if self.transposed else 1]


def weights_of_file(file: Path) -> dict[str, SavedWeight]:
    """Return where the weights in a .safetensors file lie, by name. Raises `UserError`."""
    try:
        with safe_open(file, framework="pt") as saved:
            return {
                name: SavedWeight(file, name, tuple(saved.get_slice(name).get_shape()))
                for name in saved.keys()
            }
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot read {file}: {error}") from None


def check_shapes(
    source: Path | str, saved: Mapping[str, tuple[int, ...]], weights: Mapping[str, Tensor]
) -> None:
    """Raise `UserError` for one of `weights` that `source` lacks or has in another shape.

    `saved` are the shapes of the weights in `source`, by name.
    """
    for name, value in weights.items():
        if saved.get(name) != tuple(value.shape):
            found = f"in shape {list(saved[name])}" if name in saved else "not at all"
            raise UserError(
                f"checkpoint.init_from: {source} has {name} {found}, the config's model in "
                f"{list(value.shape)}: set [model], data.tokenizer and training.seq_len "
                "as they were there"
            )


@torch.no_grad()
def load_weights(
    source: str, saved: Mapping[str, SavedWeight], weights: Mapping[str, Tensor]
) -> None:
    """Fill `weights`, sharded or not, with those that `saved` names. Raises `UserError`.

    Every rank reads its own part only. `source` is what the user named.
    """
    check_shapes(source, {name: place.shape for name, place in saved.items()}, weights)
    try:
        for name, target in weights.items():
            if local_part(target).numel():
                local_part(target).copy_(read_part(saved[name], local_intervals(target)))
    except (OSError, SafetensorError) as error:
        raise UserError(f"checkpoint.init_from: cannot read {source}: {error}") from None


def read_part(place: SavedWeight, part: Sequence[tuple[int, int]]) -> Tensor:
    """Return a part of our weight: an interval of each dim.

    Raises `OSError` and `SafetensorError`.
    """
    slices = [slice(*interval) for interval in part]
    with safe_open(place.file, framework="pt") as saved:
        there: Tensor = saved.get_slice(place.name)[tuple(slices[:: -1 if place.transposed else 1])]
    return there.T if place.transposed else there


def write_weights(
    file: Path, entries: Mapping[str, tuple[torch.dtype, Sequence[int]]], values: Iterable[Tensor]
) -> None:
    """Write a .safetensors file, durably, whole or not at all.

    `entries` are dtype and shape by name. `values` are the tensors in the same order. They are
    asked for one by one, so a file needs no more memory than its largest tensor. The library
    writes a file from all of its tensors at once. Raises `OSError`.
    """
    partial = file.with_name(file.name + PARTIAL)
    try:
        with partial.open("wb") as stream:
            stream.write(header(entries))
            for (dtype, shape), value in zip(entries.values(), values, strict=True):
                assert value.shape == torch.Size(shape)
                value.detach().to(dtype).contiguous().view(-1).view(torch.uint8).numpy().tofile(
                    stream
                )
            stream.flush()
            os.fsync(stream.fileno())
        partial.rename(file)
        sync_folder(file.parent)
    finally:
        partial.unlink(missing_ok=True)


def header(entries: Mapping[str, tuple[torch.dtype, Sequence[int]]]) -> bytes:
    """Return what a .safetensors file begins with: names, dtypes, shapes and places of tensors.

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
