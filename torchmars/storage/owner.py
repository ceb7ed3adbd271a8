"""Who may write in a folder: the process whose random id the owner's file there has.

On a disk a lock beside that file keeps others off, in an object store the file does, which is
created only where there is none. A machine may stand still and wake up when the others have gone on
without it. So each process compares the id with its own before it publishes anything.
"""

import contextlib
import json
import os
import secrets
import time
from pathlib import Path, PurePath
from typing import Protocol

from torchmars.cluster import process
from torchmars.core import locks
from torchmars.core.errors import Unreachable, UserError
from torchmars.core.files import read_text, write_durably
from torchmars.storage.stores import Store, reading, writing

NAME = "owner"  # of the file


class LostOwnership(UserError):
    """Another process has taken the folder of this one."""


class Owner(Protocol):
    """The right of this process to write in a folder."""

    def check(self) -> None:
        """Raise `LostOwnership` if another process has taken the folder.

        Raises `Unreachable` where a store does not answer.
        """

    def release(self) -> None:
        """Let other processes have the folder, while this one continues with something else."""


def in_use(folder: PurePath, owner: str, over: str = "") -> UserError:
    """Return the error of a folder that another run has; `over` says what to do if that is over."""
    return UserError(
        f"another run uses {folder} ({owner}): stop it first{over}, or set checkpoint.folder to "
        "another folder"
    )


def lost(file: PurePath, owner: str) -> LostOwnership:
    """Return the error of a process whose folder another one has taken."""
    return LostOwnership(
        f"{file} was taken by {owner}: this process stood still, and writes nothing any more"
    )


def owner_of(lock: Path) -> str:
    """Return who holds the lock of a file, in words."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return read_text(lock) or "another process"
    return "another process"


class FileOwner:
    """The owner of a folder on a disk. A process of an earlier round of its machines is over."""

    def __init__(self, lock: Path, doing: str) -> None:
        """Take the folder of the file `lock`. Raises `UserError` if another process has it."""
        self.lock, self.file = lock, lock.with_name(NAME)
        own = os.environ.get(process.ROUND, "")
        self.descriptor = locks.lock(lock, doing, over=is_earlier(self._former()[1], own))
        self.folder_id = self._former()[0] or secrets.token_hex(8)
        """The same for each process that has the folder, and another one for a copy of it."""
        self.mine: str | None = None
        """The content of the owner's file; None if it cannot be written."""
        with contextlib.suppress(OSError):  # a folder that cannot be written is reported later
            text = f"{self.folder_id} {secrets.token_hex(8)} {own}".strip()
            write_durably(self.file, text)
            self.mine = text
            self.folder_id += f" {os.stat(lock.parent).st_ino}"

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


class StoreOwner:
    """The owner of a folder in an object store. A former process of the same run is over.

    The lock of the run's own folder, which this process has, says so.
    """

    def __init__(self, store: Store, folder: PurePath, run: FileOwner) -> None:
        """Take `folder` for a run. Raises `UserError` if another run has it, and `Unreachable`."""
        self.store, self.file = store, folder / NAME
        self.me = {
            "run": run.folder_id,
            "process": f"process {os.getpid()} on {process.node()}",
            "since": time.strftime("%Y-%m-%d %H:%M:%S"),
            "id": secrets.token_hex(8),
        }
        found = self._read()
        if not found:
            with contextlib.suppress(Exception):  # not all stores can do this
                self._write(mode="create")
            found = self._read()
        if found and found.get("run") != self.me["run"]:
            raise in_use(folder, holder_of(found), f" or, if it is over, delete {self.file}")
        if found != self.me:
            with reading(self.file):
                self._write()

    def check(self) -> None:
        """Raise `LostOwnership` if another process has taken the folder, or `Unreachable`."""
        found = self._read()
        if found and "id" not in found:  # it may have been spoiled on its way
            raise Unreachable(f"{self.file} cannot be read: it is none of this program's")
        if found.get("id") != self.me["id"]:
            raise lost(self.file, holder_of(found) if found else "somebody who deleted it")

    def release(self) -> None:
        """Let other runs have the folder."""
        with contextlib.suppress(UserError, OSError):
            self.check()
            with writing(self.file):
                self.store.files.rm_file(str(self.file))

    def _read(self) -> dict[str, str]:
        """Return the owner's file: empty if there is none, without an id if it is damaged."""
        try:
            with reading(self.file):
                content = self.store.files.cat_file(str(self.file))
            found = json.loads(content)
        except FileNotFoundError:
            return {}
        except ValueError:
            found = None
        return found if isinstance(found, dict) else {"process": "an unknown process"}

    def _write(self, **options: str) -> None:
        self.store.files.pipe_file(str(self.file), json.dumps(self.me).encode(), **options)


def holder_of(found: dict[str, str]) -> str:
    """Return who has a folder in a store, in words."""
    return f"{found.get('process')}, since {found.get('since', '?')}"
