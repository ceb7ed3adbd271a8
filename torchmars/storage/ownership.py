"""Who may write in a folder: one process at a time, as long as it shows that it is not silent."""

import contextlib
import os
import secrets
import threading
from pathlib import Path, PurePath

from torchmars.cluster import process
from torchmars.core import locks
from torchmars.core.errors import UserError
from torchmars.core.files import read_text, write_durably

RENEW_SECONDS = 10.0  # after which a process shows again that it is not silent


class LostOwnership(UserError):
    """Another process has taken the folder of this one."""


class Ownership:
    """The right of this process to write in a folder.

    A machine may stand still and wake up when the others have gone on without it. So whoever takes
    a folder writes a name of its own there, and each process compares that with its own before it
    publishes anything. A thread renews the ownership: one that is silent for long is taken.
    """

    def __init__(self, seconds: float) -> None:
        """Renew the ownership, which this process has taken, every so many seconds."""
        self.seconds, self.ended = seconds, threading.Event()
        self.thread = threading.Thread(target=self._keep_renewing, name="ownership", daemon=True)
        self.thread.start()

    def check(self) -> None:
        """Raise `LostOwnership` if another process has taken the folder.

        Raises `Unreachable` where a store does not answer.
        """
        raise NotImplementedError

    def rest(self) -> None:
        """Renew the ownership no more. It ends with this process."""
        self.ended.set()

    def release(self) -> None:
        """Let other processes have the folder, while this one continues with something else."""
        self.rest()
        self.thread.join()
        self._give_up()

    def _keep_renewing(self) -> None:
        while not self.ended.wait(self.seconds):
            with contextlib.suppress(OSError, UserError):  # told where something is published
                self.check()
                self._renew()

    def _renew(self) -> None:
        raise NotImplementedError

    def _give_up(self) -> None:
        raise NotImplementedError


def in_use(folder: PurePath, owner: str) -> UserError:
    """Return the error of a folder of checkpoints that another run has."""
    return UserError(
        f"another run uses {folder} ({owner}): stop it first, or set checkpoint.folder to another "
        "folder"
    )


def owner_of(lock: Path) -> str:
    """Return who holds the lock of a file, in words."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return read_text(lock) or "another process"
    return "another process"


class FileOwnership(Ownership):
    """Ownership of a folder on a disk: a lock, and the name beside it, the generation.

    The lock is touched to renew it. One that is silent for `locks.PATIENCE` seconds is taken, and
    one of an earlier round of the same machines at once: they have met without its process.
    """

    def __init__(self, file: Path, doing: str) -> None:
        """Take the lock `file`. Raises `UserError` if another process has it and is not silent."""
        self.file, self.generation = file, file.with_name("generation")
        self.mine: str | None = None
        """The generation of this process; None if it cannot be written."""
        patience = 0.0 if self._is_of_earlier_round() else locks.PATIENCE
        self.descriptor = locks.lock(file, doing, patience, from_silent=True)
        with contextlib.suppress(OSError):  # a folder that cannot be written is reported later
            name = f"{secrets.token_hex(8)} {os.environ.get(process.ROUND, '')}".strip()
            write_durably(self.generation, name)
            self.mine = name
        super().__init__(RENEW_SECONDS)

    def check(self) -> None:
        # Opened each time: so a network file system sees the writes of others.
        with contextlib.suppress(OSError, UnicodeDecodeError):
            if self.mine is None or read_text(self.generation) == self.mine:
                return
            raise LostOwnership(
                f"{self.file} was taken by {owner_of(self.file)}: this process was silent for too "
                "long, and writes nothing any more"
            )

    def _is_of_earlier_round(self) -> bool:
        with contextlib.suppress(OSError, ValueError):
            _, former = read_text(self.generation).split(" ")
            meeting, number = former.split(":")
            own_meeting, own_number = os.environ.get(process.ROUND, "").split(":")
            return meeting == own_meeting and int(number) < int(own_number)
        return False

    def _renew(self) -> None:
        os.utime(self.file)

    def _give_up(self) -> None:
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None
