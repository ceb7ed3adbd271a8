"""Where checkpoints lie: what is asked of such a place, and folders of local files."""

import contextlib
import errno
import hashlib
import io
import os
import re
import secrets
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, Protocol, cast

from torchmars.core.bounds import Range
from torchmars.core.console import say
from torchmars.core.errors import UserError
from torchmars.core.files import (
    PARTIAL,
    DurableFile,
    open_file,
    read_text,
    sync_folder,
    write_durably,
)
from torchmars.core.locks import RENEW_SECONDS, RunLock, is_locked, shows_life, touched
from torchmars.core.stores import store_of

if TYPE_CHECKING:
    from torchmars.checkpoint.lease import Lease  # it takes torch, which lists need not

MANIFEST = "manifest.json"
DEFAULT = "checkpoints"  # the folder of checkpoints in a run's own folder
IN_USE = ".in-use/lock"  # held by the run that has a folder of checkpoints which is not its default
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
    """A new file, written from its begin to its end, that counts and hashes what is written."""

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
        """Close the file. Raises `OSError` where its bytes cannot be written."""
        if not self.closed:
            super().close()
            self.stream.close()

    def describe(self) -> File:
        """Return the size and checksum of what was written."""
        return File(self.size, self.hash.hexdigest())


class NewFiles(Protocol):
    """The files that one process adds to a checkpoint that is not published yet."""

    size: int
    """How many bytes a file should have at most, so that several are on their way at a time."""

    def create(self, name: str) -> BinaryIO:
        """Open a new file. Raises `OSError`."""

    def finish(self) -> dict[str, File]:
        """Wait until all files that were closed are durable. Return size and checksum by name.

        Raises `OSError`.
        """


class Storage(Protocol):
    """A place for checkpoints. A checkpoint is there from `publish` to `delete`, and always whole.

    A crash may leave others, whose names end in PARTIAL, DELETED or DAMAGED. All methods raise
    `OSError`. A store that does not answer raises `Unreachable` where something is to be read.
    """

    def refuse_another(self, folder: PurePath, run: Path) -> None:
        """Raise `UserError` where another run than that of the folder `run` is seen at work.

        For a start: nothing is written, and whoever goes on must `take` the folder.
        """

    def take(self, folder: PurePath, run: Path) -> "RunLock | Lease | None":
        """Keep other runs than that of the folder `run` from a folder of checkpoints.

        None where the lock in `run` does. Raises `UserError` where another run has the folder.
        """

    def list(self, folder: PurePath) -> dict[str, bool]:
        """Return the names in a folder, and whether each is a folder; none where it is missing."""

    def open(self, file: PurePath) -> BinaryIO:
        """Open a file, of which any range can be read."""

    def archives(self, file: PurePath, ranges: Sequence[tuple[int, int]]) -> Iterator[BinaryIO]:
        """Yield each of `ranges`, (offset, bytes) in ascending order, as a stream of its own.

        Each is what torch.save wrote at one time.
        """

    def stage(self, checkpoint: PurePath) -> PurePath:
        """Return the empty folder for the files of a checkpoint that is not published yet."""

    def new_files(self, staged: PurePath, limit: int) -> NewFiles:
        """Return what adds files to a staged checkpoint.

        `limit` is how many bytes of them may wait on this machine to be durable elsewhere.
        """

    def publish(self, staged: PurePath, checkpoint: PurePath, manifest: str) -> None:
        """Add the manifest, durably: the checkpoint is there now. One of its name is set aside."""

    def set_aside(self, checkpoint: PurePath) -> None:
        """Rename a damaged checkpoint, durably."""

    def delete(self, path: PurePath) -> None:
        """Delete a checkpoint, or what a crash left. Of a linked one delete the link alone.

        What no save wrote stays, with an `OSError` that names it.
        """


class LocalStorage:
    """Folders of local files. A checkpoint is staged under another name, and renamed last."""

    def refuse_another(self, folder: PurePath, run: Path) -> None:
        folder = Path(folder)
        for lock in (folder / IN_USE, lock_of_default(folder, run)):
            if lock is None or touched(lock) is None or touched(run / "lock"):
                continue  # the run's own lock tells a rank of this run from another run
            say(f"waiting to see whether another run still uses {folder}")
            if shows_life(partial(touched, lock), 2 * RENEW_SECONDS):
                raise in_use(folder, lock)

    def take(self, folder: PurePath, run: Path) -> RunLock | None:
        """Lock a file among the checkpoints, and see that no run has the folder as its default.

        A run whose default it is has locked its own folder before, and looks for that file then. So
        of two that start at once, at least one sees the other.
        """
        folder = Path(folder)
        lock = folder / IN_USE
        if folder.resolve() == (run / DEFAULT).resolve() and not lock.exists():
            return None
        try:
            taken = RunLock(lock, f"keeping its checkpoints in {folder}")
        except UserError as error:
            raise UserError(f"{error}, or set checkpoint.folder to another folder") from None
        others = lock_of_default(folder, run)
        # Another user's cannot be opened to be locked.
        for file in (lock if taken.descriptor is None else None, others):
            if file is not None and is_locked(file):
                taken.release()
                raise in_use(folder, file)
        return taken

    def list(self, folder: PurePath) -> dict[str, bool]:
        try:
            with os.scandir(folder) as found:
                entries = [*found]
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            return {}
        return {each.name: is_folder(each) for each in entries}

    def open(self, file: PurePath) -> BinaryIO:
        return open_file(Path(file))

    def archives(self, file: PurePath, ranges: Sequence[tuple[int, int]]) -> Iterator[BinaryIO]:
        # Not at the top: commands that only list checkpoints need not wait for torch.
        from torch.distributed.checkpoint.utils import _create_file_view

        with self.open(file) as stream:
            for begin, size in ranges:
                yield cast(BinaryIO, _create_file_view(cast(io.IOBase, stream), begin, size))

    def stage(self, checkpoint: PurePath) -> PurePath:
        # Another name each time: a machine that stood still may wake up and write to its own.
        name = f"{checkpoint.name}-{secrets.randbelow(10**9)}{PARTIAL}"
        staged = Path(checkpoint).with_name(name)
        staged.mkdir(parents=True)
        return staged

    def new_files(self, staged: PurePath, limit: int) -> NewFiles:
        return LocalFiles(Path(staged))

    def publish(self, staged: PurePath, checkpoint: PurePath, manifest: str) -> None:
        staged, checkpoint = Path(staged), Path(checkpoint)
        write_durably(staged / MANIFEST, manifest)  # and the names of all files beside it
        if os.path.lexists(checkpoint):  # what the run could not resume from
            self.set_aside(checkpoint)
        staged.rename(checkpoint)
        sync_folder(checkpoint.parent)
        sync_folder(checkpoint.parent.parent)  # the folder of checkpoints may be new

    def set_aside(self, checkpoint: PurePath) -> None:
        self._rename(Path(checkpoint), DAMAGED)

    def delete(self, path: PurePath) -> None:
        path = Path(path)
        self.remove(path if path.suffix else self._rename(path, DELETED))

    @staticmethod
    def remove(path: Path) -> None:
        """Delete a link, a file, or the files of a checkpoint and their folder if that is all."""
        if path.is_symlink() or not path.is_dir():
            path.unlink()
            return
        with os.scandir(path) as found:
            names = {each.name: each.is_dir(follow_symlinks=False) for each in found}
        others = [name for name, is_dir in names.items() if is_dir or not WRITTEN.fullmatch(name)]
        for name in names.keys() - others:
            (path / name).unlink(missing_ok=True)
        if others:
            raise Foreign(path, others)
        path.rmdir()

    def _rename(self, checkpoint: Path, suffix: str) -> Path:
        target = self._free(checkpoint, suffix)
        checkpoint.rename(target)
        sync_folder(checkpoint.parent)
        return target

    def _free(self, checkpoint: Path, suffix: str) -> Path:
        """Delete what has a checkpoint's name with a suffix, and return that path.

        Return one with a number where it cannot be deleted.
        """
        number, path = 0, checkpoint.with_name(checkpoint.name + suffix)
        while True:
            with contextlib.suppress(OSError):
                self.remove(path)
            if not os.path.lexists(path):
                return path
            number += 1
            path = checkpoint.with_name(f"{checkpoint.name}-{number}{suffix}")


def is_folder(entry: "os.DirEntry[str]") -> bool:
    """Return whether an entry of a folder of checkpoints is a folder.

    A link may lead where nobody can look. Raises `UserError` where it may be a checkpoint.
    """
    try:
        return entry.is_dir()
    except OSError as error:
        if not entry.name.startswith("step-"):
            return False
        raise UserError(
            f"{entry.path} cannot be looked at ({error.strerror}): restore it, or move it away"
        ) from None


def lock_of_default(folder: Path, run: Path) -> Path | None:
    """Return the lock of another run than `run` whose own folder a folder of checkpoints is in."""
    real = folder.resolve()
    its = real.parent / "lock"
    return its if real.name == DEFAULT and real.parent != run.resolve() else None


def in_use(folder: Path, lock: Path) -> UserError:
    """Return the error of a folder of checkpoints that another run has."""
    owner = "another process"
    with contextlib.suppress(OSError, UnicodeDecodeError):
        owner = read_text(lock) or owner
    return UserError(
        f"another run uses {folder} ({owner}): stop it first, or set checkpoint.folder to another "
        "folder"
    )


class Foreign(OSError):
    """A checkpoint holds what no save wrote: files called `names`, which stay."""

    def __init__(self, checkpoint: PurePath, names: Iterable[str]) -> None:
        why = f"it holds {min(names)}, which no save wrote: move that away"
        super().__init__(errno.ENOTEMPTY, why, str(checkpoint))


class LocalFiles:
    """New files of a local folder. Each is durable once it is closed."""

    size = 2**63

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.created: dict[str, NewFile] = {}

    def create(self, name: str) -> BinaryIO:
        self.created[name] = NewFile(DurableFile(self.folder / name))
        return cast(BinaryIO, self.created[name])

    def finish(self) -> dict[str, File]:
        return {name: file.describe() for name, file in sorted(self.created.items())}


LOCAL = LocalStorage()


def storage_of(path: PurePath) -> Storage:
    """Return where a path, which `place` gave, lies. Raises `UserError` for an unknown store."""
    if isinstance(path, Path):
        return LOCAL
    from torchmars.checkpoint.objects import ObjectStorage  # which imports this module

    return ObjectStorage(store_of(path))
