"""Checkpoints in folders of local files."""

import contextlib
import itertools
import os
import secrets
from pathlib import Path, PurePath
from typing import BinaryIO

from torchmars.cluster import process
from torchmars.core import files
from torchmars.core.errors import UserError
from torchmars.core.files import (
    PARTIAL,
    DurableFile,
    open_file,
    read_text,
    sync_folder,
    write_durably,
)
from torchmars.storage.storage import (
    DAMAGED,
    DELETED,
    MANIFEST,
    WRITTEN,
    Foreign,
    in_use,
    lost,
)

DEFAULT = "checkpoints"  # the folder of checkpoints in a run's own folder
IN_USE = ".in-use/lock"  # held by the run that has a folder of checkpoints which is not its default


class FileOwner:
    """The right of this process to write in a folder, by the id in the owner's file there.

    A machine may stand still and wake up when the others have gone on without it. So each process
    compares that id with its own before it publishes anything. A process of an earlier round of its
    machines is over.
    """

    def __init__(self, lock: Path, doing: str) -> None:
        """Take the folder of the file `lock`. Raises `UserError` if another process has it."""
        self.lock, self.file = lock, lock.with_name("owner")
        own = os.environ.get(process.ROUND, "")
        self.descriptor = files.lock(lock, doing, over=is_earlier(self._former()[1], own))
        self.id = self._former()[0] or secrets.token_hex(8)
        """The same for each process that has the folder, and another one for a copy of it."""
        self.mine: str | None = None
        """The content of the owner's file; None if it cannot be written."""
        with contextlib.suppress(OSError):  # a folder that cannot be written is reported later
            text = f"{self.id} {secrets.token_hex(8)} {own}".strip()
            write_durably(self.file, text)
            self.mine = text
            self.id += f" {os.stat(lock.parent).st_ino}"

    def check(self) -> None:
        """Raise `LostOwnership` if another process has taken the folder."""
        # Opened each time: so a network file system sees the writes of others. The lock itself must
        # not be opened: closing it would give it up.
        with contextlib.suppress(OSError, UnicodeDecodeError):
            if self.mine is not None and read_text(self.file) != self.mine:
                raise lost(self.lock, owner_of(self.lock))

    def release(self) -> None:
        """Let other processes have the folder."""
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None

    def _former(self) -> tuple[str, str]:
        """Return the folder's id and the round of the process that had it; empty if unknown."""
        with contextlib.suppress(OSError, ValueError):
            folder_id, _, *met = read_text(self.file).split(" ")
            return folder_id, "".join(met)
        return "", ""


def is_earlier(met: str, own: str) -> bool:
    """Return whether a round, MEETING:NUMBER, came before another one of the same meeting."""
    with contextlib.suppress(ValueError):
        (meeting, number), (own_meeting, own_number) = met.split(":"), own.split(":")
        return meeting == own_meeting and int(number) < int(own_number)
    return False


def owner_of(lock: Path) -> str:
    """Return who holds the lock of a file, in words."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return read_text(lock) or "another process"
    return "another process"


class LocalStorage:
    """Folders of local files. A checkpoint is staged under another name, and renamed last.

    As in any place for checkpoints, one is there from `publish` to `delete`, and always whole. A
    crash may leave others, whose names end in PARTIAL, DELETED or DAMAGED. All methods raise
    `OSError`. A store that does not answer raises `Unreachable` where something is to be read.
    """

    file_size = 2**63
    """How many bytes a file of tensors should have at most."""

    def take(self, folder: PurePath, run: Path, run_id: str) -> FileOwner | None:
        """Keep other runs from a folder of checkpoints: than `run`, whose folder this process has.

        None if the lock in `run` does. Raises `UserError` if another run has the folder.

        It locks a file among the checkpoints, and sees that no run has the folder as its default. A
        run whose default it is has locked its own folder before, and looks for that file then. So
        of two that start at once, at least one sees the other.
        """
        folder = Path(folder)
        lock, real = folder / IN_USE, folder.resolve()
        if real == (run / DEFAULT).resolve() and not lock.exists():
            return None
        try:
            if lock.parent.is_symlink():
                raise UserError(f"{lock.parent} is a link: remove it")
            taken = FileOwner(lock, f"keeping its checkpoints in {folder}")
        except UserError as error:
            raise UserError(f"{error}, or set checkpoint.folder to another folder") from None
        others = (
            real.parent / "lock" if real.name == DEFAULT and real.parent != run.resolve() else None
        )
        # Another user's cannot be opened to be locked.
        for file in (lock if taken.descriptor is None else None, others):
            if file is not None and files.is_locked(file):
                taken.release()
                raise in_use(folder, owner_of(file))
        return taken

    def list(self, folder: PurePath) -> dict[str, bool]:
        """Return the names in a folder, and whether each is a folder; none where it is missing.

        Raises `UserError` if it cannot be known which checkpoints there are.
        """
        try:
            with os.scandir(folder) as found:
                # Of others' links some may lead where nobody can look.
                return {
                    each.name: each.name.startswith("step-") and each.is_dir() for each in found
                }
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except OSError as error:
            raise UserError(
                f"{error.filename} cannot be looked at ({error.strerror}): restore it, or move it "
                "away"
            ) from None

    def open(self, file: PurePath) -> BinaryIO:
        """Open a file, of which any range can be read."""
        return open_file(Path(file))

    def stage(self, checkpoint: PurePath) -> PurePath:
        """Return the empty folder for the files of a checkpoint that is not published yet."""
        # Another name each time: a machine that stood still may wake up and write to its own.
        name = f"{checkpoint.name}-{secrets.randbelow(10**9)}{PARTIAL}"
        staged = Path(checkpoint).with_name(name)
        staged.mkdir(parents=True)
        return staged

    def create(self, file: PurePath) -> BinaryIO:
        """Open a new file of a staged checkpoint, which is durable once it is closed."""
        return DurableFile(Path(file))

    def publish(self, staged: PurePath, checkpoint: PurePath, manifest: str) -> None:
        """Add the manifest, durably: the checkpoint is there now. One of its name is set aside."""
        staged, checkpoint = Path(staged), Path(checkpoint)
        write_durably(staged / MANIFEST, manifest)  # and the names of all files beside it
        if os.path.lexists(checkpoint):  # the run could not resume from it
            self.set_aside(checkpoint)
        staged.rename(checkpoint)
        sync_folder(checkpoint.parent)
        sync_folder(checkpoint.parent.parent)  # the folder of checkpoints may be new

    def set_aside(self, checkpoint: PurePath) -> None:
        """Rename a damaged checkpoint, durably."""
        self._rename(Path(checkpoint), DAMAGED)

    def delete(self, path: PurePath) -> None:
        """Delete a checkpoint, or the remains of one. Of a linked one delete the link alone.

        Files that no save wrote stay, with an `OSError` that names them.
        """
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
        """Rename a checkpoint to its name and a suffix, or another number where that is taken."""
        for number in itertools.count():
            numbered = f"{checkpoint.name}-{number}" if number else checkpoint.name
            target = checkpoint.with_name(numbered + suffix)
            with contextlib.suppress(OSError):
                self.remove(target)
            if not os.path.lexists(target):
                break
        checkpoint.rename(target)
        sync_folder(checkpoint.parent)
        return target


LOCAL = LocalStorage()
