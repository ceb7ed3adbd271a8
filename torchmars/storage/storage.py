"""The interface of a place for checkpoints."""

import errno
import hashlib
import io
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Annotated, Any, BinaryIO, Protocol, cast

from torchmars.core.bounds import Range
from torchmars.core.files import PARTIAL, DurableFile
from torchmars.storage.owner import FileOwner, Owner

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


class NewFiles:
    """The files that one process adds to a checkpoint that is not published yet.

    They lie in a local folder, and each is durable once it is closed.
    """

    size = 2**63
    """How many bytes a file should have at most, so that several are on their way at a time."""

    def __init__(self, folder: Path) -> None:
        self.local = folder
        self.created: dict[str, NewFile] = {}

    def create(self, name: str) -> BinaryIO:
        """Open a new file. Raises `OSError`."""
        self.created[name] = NewFile(DurableFile(self.local / name))
        return cast(BinaryIO, self.created[name])

    def finish(self) -> dict[str, File]:
        """Wait until all files that were closed are durable. Return size and checksum by name.

        Raises `OSError`.
        """
        return {name: file.describe() for name, file in sorted(self.created.items())}


class Storage(Protocol):
    """A place for checkpoints. A checkpoint is there from `publish` to `delete`, and always whole.

    A crash may leave others, whose names end in PARTIAL, DELETED or DAMAGED. All methods raise
    `OSError`. A store that does not answer raises `Unreachable` where something is to be read.
    """

    def take(self, folder: PurePath, run: FileOwner) -> Owner | None:
        """Keep runs other than the one that has `run`, its own folder, from one of checkpoints.

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

    def new_files(self, staged: PurePath, limit: int) -> NewFiles:
        """Return an object that adds files to a staged checkpoint.

        `limit` is how many bytes of them may wait on this machine to be durable elsewhere.
        """

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
