"""Files that users bring, files that survive a crash, and locks that do not."""

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
import socket
import stat
import time
from pathlib import Path
from typing import Literal

from torchmars.core.console import say
from torchmars.core.errors import UserError

PARTIAL = ".partial"  # ends the name of what is not complete yet
LARGEST = 2**30  # bytes of a text file that is read whole


def path_problem(path: Path | str, kind: Literal["file", "folder"]) -> str:
    """Return why `path` cannot be a file or a folder, existing or new; "" where it can."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return ""
    except OSError as error:
        return error.strerror or str(error)
    except ValueError:  # a NUL character, or half of one that UTF-16 has in two
        return "its characters cannot be those of a path"
    if kind == "folder":
        return "" if stat.S_ISDIR(mode) else os.strerror(errno.ENOTDIR)
    if stat.S_ISDIR(mode):
        return os.strerror(errno.EISDIR)
    return "" if stat.S_ISREG(mode) else "Not a regular file"


def read_bytes(path: Path) -> bytes:
    """The content of a regular file. Raises `OSError` for anything else.

    That is not even opened: whoever opens a FIFO waits for its other end.
    """
    if wrong := path_problem(path, "file"):
        raise OSError(errno.EINVAL, wrong, str(path))
    with path.open("rb") as stream:
        content = stream.read(LARGEST + 1)
    if len(content) > LARGEST:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
    return content


def read_text(path: Path) -> str:
    """The text of a regular file in UTF-8. Raises `OSError` and `UnicodeDecodeError`."""
    return read_bytes(path).decode()


def write_durably(path: Path, text: str) -> None:
    """Write a small file so that a crash leaves the old one or the new one, whole."""
    partial = path.with_name(path.name + PARTIAL)
    with partial.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    partial.rename(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256(file: Path) -> str:
    """The SHA-256 of what is in a file. Raises `OSError`."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def remove(path: Path) -> None:
    """Delete a file, a folder with all that is in it, or a link; never what a link points to."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def lock(file: Path, doing: str, patience: float = 60.0) -> None:
    """Keep other processes from what this one is `doing` for as long as it lives.

    Waits `patience` seconds for one that is about to end. Raises `UserError` where it does not.
    The file says which process has the lock.
    """
    with contextlib.suppress(
        OSError
    ):  # a folder that cannot be written, as will be said later, or a file system without locks
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT)
        deadline, told = time.monotonic() + patience, False
        while True:
            try:
                # Not flock: that would live on in a rank's helpers.
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                owner = os.pread(descriptor, 1000, 0).decode(errors="replace") or "unknown which"
                if time.monotonic() > deadline:
                    raise UserError(
                        f"another process is {doing}: stop it first ({owner})"
                    ) from None
                if not told:
                    say(f"waiting for another process that is {doing} ({owner})")
                told = True
                time.sleep(0.5)
                continue
            os.ftruncate(descriptor, 0)
            since = time.strftime("%Y-%m-%d %H:%M:%S")
            me = f"process {os.getpid()} on {socket.gethostname()}, since {since}"
            os.pwrite(descriptor, me.encode(), 0)
            return


def is_gone(file: Path) -> bool:
    """Whether a file that was there is not any more.

    A file system that cannot be asked just now does not count.
    """
    try:
        file.stat()
    except FileNotFoundError:
        return True
    except OSError:
        pass
    return False
