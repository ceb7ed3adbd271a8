"""The interface of a place for checkpoints."""

import errno
import hashlib
import io
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Annotated, Any, BinaryIO, Protocol

from torchmars.core.bounds import Range
from torchmars.core.errors import UserError
from torchmars.core.files import PARTIAL

MANIFEST = "manifest.json"
# The files of a checkpoint, and how they are called until they are complete.
WRITTEN = re.compile(
    rf"(__\d+_\d+\.distcp|\.metadata|{re.escape(MANIFEST)})({re.escape(PARTIAL)})?"
)
# End the names of checkpoints that are to be deleted, or that could not be loaded.
DELETED, DAMAGED = ".deleted", ".damaged"


@dataclass
class File:
    """A file of a checkpoint: its size in bytes and SHA-256."""

    size: Annotated[int, Range(0, 2**63 - 1)]
    sha256: str


class NewFile(io.RawIOBase):
    """A new file, written from start to end, that counts and hashes its bytes."""

    def __init__(self, stream: BinaryIO) -> None:
        """Write to `stream`, which is closed with this file."""
        self.stream, self.hash, self.size = stream, hashlib.sha256(), 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.hash.update(data)
        self.size += self.stream.write(data)
        return memoryview(data).nbytes

    def tell(self) -> int:
        return self.size

    def close(self) -> None:
        """Close the file. Raises `OSError` if its bytes cannot be written."""
        if not self.closed:
            super().close()
            self.stream.close()

    def describe(self) -> File:
        """Return the size and checksum of the file."""
        return File(self.size, self.hash.hexdigest())


class Owner(Protocol):
    """The right of this process to write in a folder, by the id in the owner's file there.

    A machine may stand still and wake up when the others have gone on without it. So each process
    compares that id with its own before it publishes anything.
    """

    def check(self) -> None:
        """Raise `LostOwnership` if another process has taken the folder.

        Raises `Unreachable` where a store does not answer.
        """

    def release(self) -> None:
        """Let other processes have the folder, while this one continues with something else."""


class LostOwnership(UserError):
    """Another process has taken the folder of this one."""


def lost(file: PurePath, owner: str) -> LostOwnership:
    """Return the error of a process whose folder another one has taken."""
    return LostOwnership(
        f"{file} was taken by {owner}: this process stood still, and writes nothing any more"
    )


def in_use(folder: PurePath, owner: str, over: str = "") -> UserError:
    """Return the error of a folder that another run has; `over` says what to do if that is over."""
    return UserError(
        f"another run uses {folder} ({owner}): stop it first{over}, or set checkpoint.folder to "
        "another folder"
    )


class Storage(Protocol):
    """A place for checkpoints. A checkpoint is there from `publish` to `delete`, and always whole.

    A crash may leave others, whose names end in PARTIAL, DELETED or DAMAGED. All methods raise
    `OSError`. A store that does not answer raises `Unreachable` where something is to be read.
    """

    file_size: int
    """How many bytes a file of tensors should have at most."""

    def take(self, folder: PurePath, run: Path, run_id: str) -> Owner | None:
        """Keep other runs from a folder of checkpoints: than `run`, whose folder this process has.

        None if the lock in `run` does. Raises `UserError` if another run has the folder.
        """

    def list(self, folder: PurePath) -> dict[str, bool]:
        """Return the names in a folder, and whether each is a folder; none where it is missing."""

    def open(self, file: PurePath) -> BinaryIO:
        """Open a file, of which any range can be read."""

    def archives(self, file: PurePath, ranges: Sequence[tuple[int, int]]) -> Iterator[BinaryIO]:
        """Yield each of `ranges`, (offset, bytes) in ascending order, as a stream of its own.

        Each is the result of one torch.save.
        """

    def stage(self, checkpoint: PurePath) -> PurePath:
        """Return the empty folder for the files of a checkpoint that is not published yet."""

    def create(self, file: PurePath) -> BinaryIO:
        """Open a new file of a staged checkpoint, which is durable once it is closed."""

    def publish(self, staged: PurePath, checkpoint: PurePath, manifest: str) -> None:
        """Add the manifest, durably: the checkpoint is there now. One of its name is set aside."""

    def set_aside(self, checkpoint: PurePath) -> None:
        """Rename a damaged checkpoint, durably."""

    def delete(self, path: PurePath) -> None:
        """Delete a checkpoint, or the remains of one. Of a linked one delete the link alone.

        Files that no save wrote stay, with an `OSError` that names them.
        """


class Foreign(OSError):
    """A checkpoint holds files that no save wrote, called `names`, which stay."""

    def __init__(self, checkpoint: PurePath, names: Iterable[str]) -> None:
        why = f"it holds {min(names)}, which no save wrote: move that away"
        super().__init__(errno.ENOTEMPTY, why, str(checkpoint))
