"""Locks that end with their process."""

import contextlib
import fcntl
import os
import re
import secrets
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path

from torchmars.core.console import say
from torchmars.core.errors import UserError
from torchmars.core.files import is_at, open_file, open_to_write

PATIENCE = 60.0  # seconds that a process may take to end
# What a lock says: who has it, or nothing.
OWNER = re.compile(rb"(process \d+ on .+, since .+)?")


def lock(file: Path, doing: str, patience: float | None = None, over: bool = False) -> int | None:
    """Keep other processes from doing the same as this one (`doing`) while it lives.

    Or until it closes the descriptor that is returned; None if there are no locks.

    It waits `patience` seconds, by default `PATIENCE`, for one that is about to end. Raises
    `UserError` if that one does not. Where it is known to be `over`, though its machine stands
    still and keeps the lock, a file that this process has locked takes the place of its own. The
    file names the process that has the lock. Raises `UserError` for a link and any other file.
    """
    foreign = UserError(f"{file} is no lock, and is left as it is: move it away")
    if os.path.islink(file) or os.path.exists(file) and not os.path.isfile(file):
        raise foreign
    # The folder may not be writable, which is reported later; the file system may have no locks.
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        patience = PATIENCE if patience is None else patience
        deadline, waits = time.monotonic() + patience, False
        while True:
            descriptor = open_to_write(file, os.O_RDWR)
            content = os.pread(descriptor, 1000, 0)
            if not OWNER.fullmatch(content):
                os.close(descriptor)
                raise foreign
            if _take(descriptor):
                if is_at(descriptor, file):
                    return descriptor
                os.close(descriptor)  # another one is in its place by now
                continue
            owner = content.decode(errors="replace") or "unknown which"
            os.close(descriptor)
            if over:
                say(
                    f"warning: {owner} is over, and this process continues with {doing}", error=True
                )
                return _replace(file)
            if time.monotonic() > deadline:
                raise UserError(
                    f"another process is {doing}: stop it first ({owner}), or remove {file} if its "
                    "machine is gone"
                )
            if not waits:
                say(f"waiting for another process that is {doing} ({owner})")
                waits = True
            time.sleep(min(0.5, patience))
    return None


def _take(descriptor: int) -> bool:
    """Lock an open file, and write into it who has it. Return False where another process has."""
    try:
        # Not flock: a rank's helper processes would keep that lock.
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    os.ftruncate(descriptor, 0)
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    me = f"process {os.getpid()} on {socket.gethostname()}, since {since}"
    os.pwrite(descriptor, me.encode(), 0)
    return True


def _replace(file: Path) -> int:
    """Put a file that this process has locked in the place of `file`. Return its descriptor."""
    new = file.with_name(f"{file.name}-{secrets.token_hex(4)}")
    descriptor = open_to_write(new, os.O_RDWR)
    _take(descriptor)
    new.rename(file)
    return descriptor


def is_locked(file: Path, local: bool = False) -> bool | None:
    """Return whether another process holds the `lock` of a file, which is left as it is.

    None if this machine cannot know: locks may not reach from the machine that the file names to
    this one. They do where the file is `local`. A process must not ask for a lock of its own: that
    gives it up.
    """
    # struct flock of Linux: type, whence, start, length, process.
    question = struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    try:
        with open_file(file) as stream:
            answer = fcntl.fcntl(stream, fcntl.F_GETLK, question)
            owner = stream.read(1000).decode(errors="replace")
    except FileNotFoundError:
        return False
    except OSError:
        return None
    if struct.unpack_from("h", answer)[0] != fcntl.F_UNLCK:
        return True
    return False if local or f" on {socket.gethostname()}, since " in owner else None


@contextlib.contextmanager
def locked(file: Path, doing: str, patience: float | None = None) -> Iterator[None]:
    """Hold a `lock` in the body. Raises `UserError` as it does."""
    descriptor = lock(file, doing, patience)
    try:
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)
