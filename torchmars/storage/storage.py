"""What places for checkpoints share: the names of files, their checksums, and errors."""

import errno
import hashlib
import io
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, BinaryIO

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

    size: int
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


class Foreign(OSError):
    """A checkpoint holds files that no save wrote, called `names`, which stay."""

    def __init__(self, checkpoint: PurePath, names: Iterable[str]) -> None:
        why = f"it holds {min(names)}, which no save wrote: move that away"
        super().__init__(errno.ENOTEMPTY, why, str(checkpoint))
