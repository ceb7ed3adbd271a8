"""Memory that outlives a rank, for a copy of its part of a run: a file of tensors and a header."""

import io
import math
import os
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path, PurePath
from typing import NamedTuple

import torch
from torch import Tensor

from torchmars.checkpoint.manifest import VERSION, CheckpointManifest, parse_manifest
from torchmars.core.errors import UserError
from torchmars.core.formats import Format
from torchmars.optim.matrices.shapes import Interval
from torchmars.optim.tensors import local_intervals

COPY_FORMAT = Format("torchmars-copy", VERSION, "the run resumes from its checkpoint")
ALIGNMENT = 64  # bytes
PIECE = 2**24  # bytes of the memory of which a thread computes the checksum
GENERATIONS = 2  # copies that a rank keeps of its part
HEADERS = "rank-*-of-*-[0-9].json"


class Key(NamedTuple):
    """Which copy of a run it is. The newest one is the greatest."""

    round: int
    """Of the machines. One that they have left behind may have later steps of its own."""
    step: int
    start: str
    """A random name of the start of the ranks that made it."""
    ranks: int
    """How many parts it has."""


@dataclass(frozen=True)
class TensorKind:
    """Name and dtype of a tensor, and the part of it that a rank has."""

    name: str
    dtype: str
    box: tuple[Interval, ...]

    @property
    def shape(self) -> list[int]:
        """The shape of the part."""
        return [end - begin for begin, end in self.box]

    @property
    def bytes(self) -> int:
        """The size of the part."""
        return math.prod(self.shape) * getattr(torch, self.dtype).itemsize


def kinds_of(state: dict[str, Tensor]) -> list[TensorKind]:
    """Return the tensors, in their order. Of one that is not distributed the part is all of it."""
    return [
        TensorKind(name, str(tensor.dtype).removeprefix("torch."), local_intervals(tensor))
        for name, tensor in state.items()
    ]


def size_of(kinds: list[TensorKind]) -> int:
    """Return how many bytes a copy of such tensors takes."""
    return sum(aligned(kind.bytes) for kind in kinds)


def aligned(size: int) -> int:
    """Return a size of whole units of `ALIGNMENT`."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def views(memory: Tensor, kinds: list[TensorKind]) -> dict[str, Tensor]:
    """Return the tensors that lie in the `memory` of a copy, by name."""
    found, begin = {}, 0
    for kind in kinds:
        part = memory[begin : begin + kind.bytes]
        found[kind.name] = part.view(getattr(torch, kind.dtype)).view(kind.shape)
        begin += aligned(kind.bytes)
    return found


@dataclass(frozen=True)
class Header:
    """The contents of a copy, and the checksum of its bytes."""

    round: int
    step: int
    start: str
    rank: int
    ranks: int
    """How many there are in all."""
    manifest: str
    tensors: list[TensorKind]
    crc32: int

    @property
    def key(self) -> Key:
        """Which copy of the run it is a part of."""
        return Key(self.round, self.step, self.start, self.ranks)

    def text(self) -> str:
        """Return the text of its file."""
        return COPY_FORMAT.text(asdict(self))

    def read_manifest(self) -> CheckpointManifest:
        """Return all about the run but its tensors."""
        return parse_manifest(PurePath("manifest"), lambda _: io.BytesIO(self.manifest.encode()))

    def is_sound(self) -> bool:
        """Return whether there can be such a copy: a checksum that is right does not tell that."""
        try:
            manifest = self.read_manifest()
        except (ValueError, UserError):
            return False
        dtypes = (getattr(torch, kind.dtype, None) for kind in self.tensors)
        return (
            (self.step, self.ranks) == (manifest.step, manifest.world_size)
            and 0 <= self.rank < self.ranks
            and all(isinstance(dtype, torch.dtype) for dtype in dtypes)
            and all(0 <= begin <= end for kind in self.tensors for begin, end in kind.box)
        )


def header_of(content: bytes) -> Header:
    """Return the header in the bytes of its file. Raises `ValueError` if it is damaged."""
    return COPY_FORMAT.read(PurePath("header"), Header, lambda _: io.BytesIO(content))


def prefix_of(rank: int, ranks: int) -> str:
    """Return what the names of the files with copies of a rank begin with."""
    return f"rank-{rank:05d}-of-{ranks:05d}-"


class Slot:
    """The two files of a copy. The header comes last: without one there is no copy."""

    def __init__(self, folder: Path, rank: int, ranks: int, number: int, size: int) -> None:
        """Take `size` bytes for a rank, one of `ranks`. Raises `OSError` if there are not as many.

        Slots of another number of ranks stay.
        """
        self.data = folder / f"{prefix_of(rank, ranks)}{number}"
        self.file = self.data.with_suffix(".json")
        if not self.data.exists() or self.data.stat().st_size != size:
            self.drop()
            try:
                with self.data.open("wb") as stream:
                    if size:
                        os.posix_fallocate(stream.fileno(), 0, size)
            except OSError:
                self.data.unlink(missing_ok=True)
                raise
        self.memory = torch.from_file(str(self.data), shared=True, size=size, dtype=torch.uint8)

    def header(self) -> Header | None:
        """Return the header of the copy; None if there is no whole copy."""
        return read_header(self.file)

    def crc32(self) -> int:
        """Return the checksum of the checksums of the memory's pieces, which threads compute."""
        memory = self.memory.numpy().data
        pieces = (memory[at : at + PIECE] for at in range(0, len(memory), PIECE))
        with ThreadPoolExecutor(torch.get_num_threads()) as threads:
            sums = [each.to_bytes(4, "big") for each in threads.map(zlib.crc32, pieces)]
        return zlib.crc32(b"".join(sums))

    def complete(self, header: Header) -> None:
        """Let the copy exist."""
        partial = self.data.with_suffix(".partial")
        partial.write_text(header.text())
        partial.rename(self.file)

    def drop(self) -> None:
        """Let the copy not exist any more. Its memory stays for the next one."""
        self.file.unlink(missing_ok=True)


def read_header(file: Path) -> Header | None:
    """Return the header in a file; None if there is no whole one of this name."""
    try:
        header = COPY_FORMAT.read(file, Header)
    except (OSError, ValueError, UserError):  # it is gone, damaged, or of another version
        return None
    return header if file.name.startswith(prefix_of(header.rank, header.ranks)) else None


def headers_in(folder: Path) -> Iterator[tuple[Path, Header]]:
    """Yield the headers in a folder that are sound and whose memory is there, with their files."""
    for file in sorted(folder.glob(HEADERS)):
        header, data = read_header(file), file.with_suffix("")
        if header and header.is_sound() and data.is_file():
            if data.stat().st_size == size_of(header.tensors):
                yield file, header


def slots_of(folder: Path, key: Key) -> dict[int, tuple[Slot, Header]]:
    """Return the slots with parts of the copy `key`, and their headers, by rank."""
    found = [(int(file.stem[-1]), each) for file, each in headers_in(folder) if each.key == key]
    return {
        each.rank: (Slot(folder, each.rank, each.ranks, number, size_of(each.tensors)), each)
        for number, each in found
    }
