"""Files that users bring, files that survive a crash, locks, and the cores of this machine."""

import contextlib
import errno
import fcntl
import hashlib
import io
import math
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import Literal

from torchmars.core.console import say
from torchmars.core.errors import UserError

PARTIAL = ".partial"  # ends the name of an incomplete file or folder
LFS = b"version https://git-lfs"  # begins what Git leaves instead of a large file
PATIENCE = 60.0  # seconds that a process may take to end


def path_problem(path: PurePath | str, kind: Literal["file", "folder"]) -> str:
    """Return why `path` can be no regular file or folder; "" where it can. It need not exist."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return ""
    except (OSError, ValueError) as error:  # ValueError: characters that no path can have
        return getattr(error, "strerror", "") or str(error)
    if kind == "folder":
        return "" if stat.S_ISDIR(mode) else "Not a directory"
    return "" if stat.S_ISREG(mode) else "Not a regular file"


def check_writable(folder: Path, option: str = "run.folder") -> None:
    """Raise `UserError` if nothing can be written in a folder that `option` decides on.

    It need not exist: then the folder counts where it would be made.
    """
    there = folder
    while not os.path.lexists(there):
        there = there.parent
    if not (os.path.isdir(there) and os.access(there, os.W_OK | os.X_OK)):
        raise UserError(f"cannot write to {folder}: set {option} to a folder you can write")


def open_file(path: PurePath) -> io.BufferedReader:
    """Open a regular file to be read. Raises `OSError` for anything else.

    Anything else is not even opened: whoever opens a FIFO waits for its other end.
    """
    if wrong := path_problem(path, "file"):
        raise OSError(errno.EINVAL, wrong, str(path))
    return Path(path).open("rb")


def read_bytes(path: PurePath) -> bytes:
    """Return the content of a regular file. Raises `OSError` for anything else."""
    with open_file(path) as stream:
        content = stream.read()
    if content.startswith(LFS):
        raise OSError(errno.EINVAL, "a pointer of Git LFS: run git lfs pull beside it", str(path))
    return content


def read_text(path: Path) -> str:
    """Return the text of a regular file in UTF-8, without a byte order mark.

    Raises `OSError` and `UnicodeDecodeError`.
    """
    return read_bytes(path).decode("utf-8-sig")


def open_to_write(path: str | PurePath, flags: int) -> int:
    """Return the descriptor of a file to write to, made if there is none. An `opener` of `open`.

    Raises `OSError` for a link, which may lead to a file of somebody else.
    """
    return os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)


class DurableFile(io.BufferedWriter):
    """A new file whose bytes are on the disk once it is closed."""

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path, "w", opener=open_to_write))

    def close(self) -> None:
        """Close the file. Raises `OSError` if its bytes cannot be written."""
        try:
            if not self.closed:
                self.flush()
                os.fsync(self.fileno())
        finally:
            super().close()


def write_durably(path: Path, content: str | bytes, suffix: str = PARTIAL) -> None:
    """Write a file so that a crash leaves the old one or the new one, whole.

    It has a `suffix` until it is complete.
    """
    partial = path.with_name(path.name + suffix)
    with DurableFile(partial) as stream:
        stream.write(content.encode() if isinstance(content, str) else content)
    partial.rename(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable, where its file system can (CIFS and FUSE may not)."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def sha256(file: Path) -> str:
    """Return the SHA-256 of a file. Raises `OSError`."""
    with open_file(file) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def is_gone(file: PurePath) -> bool:
    """Return whether a file that existed does not exist any more.

    Where the file system cannot be asked just now, it counts as existing.
    """
    try:
        os.stat(file)
    except OSError as error:
        return isinstance(error, FileNotFoundError)
    return False


def lock(file: Path, doing: str, patience: float | None = None, over: bool = False) -> int | None:
    """Keep other processes from doing the same as this one (`doing`) while it lives.

    Or until it closes the descriptor that is returned; None if there are no locks.

    It waits `patience` seconds, by default `PATIENCE`, for one that is about to end. Raises
    `UserError` if that one does not, and for what is no file. Where it is known to be `over`,
    though its machine stands still and keeps the lock, a file that this process has locked takes
    the place of its own. The file names the process that has the lock.
    """
    if os.path.islink(file) or os.path.exists(file) and not os.path.isfile(file):
        raise UserError(f"{file} is no lock, and is left as it is: move it away")
    # The folder may not be writable, which is reported later; the file system may have no locks.
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        deadline = time.monotonic() + (PATIENCE if patience is None else patience)
        while True:
            descriptor = open_to_write(file, os.O_RDWR)
            owner = os.pread(descriptor, 1000, 0).decode(errors="replace") or "unknown which"
            taken = _take(descriptor)
            if taken and os.fstat(descriptor).st_nlink:  # else another one is in its place by now
                return descriptor
            os.close(descriptor)
            if taken:
                continue
            if over:
                say(f"warning: {owner} is over: this process continues with {doing}", error=True)
                new = file.with_name(f"{file.name}-{os.urandom(4).hex()}")
                _take(descriptor := open_to_write(new, os.O_RDWR))
                new.rename(file)
                return descriptor
            if time.monotonic() > deadline:
                raise UserError(
                    f"another process is {doing}: stop it first ({owner}), or remove {file} if its "
                    "machine is gone"
                )
            time.sleep(0.1)
    return None


def _take(descriptor: int) -> bool:
    """Lock an open file, and write into it who has it. Return False where another process has."""
    try:
        # Not flock: a rank's helper processes would keep that lock.
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # which one POSIX leaves to the system
        return False
    os.ftruncate(descriptor, 0)
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    me = f"process {os.getpid()} on {os.uname().nodename}, since {since}"
    os.pwrite(descriptor, me.encode(), 0)
    return True


def is_locked(file: Path, local: bool = False) -> bool | None:
    """Return whether another process holds the `lock` of a file, which is left as it is.

    None if this machine cannot know: locks may not reach from the machine that the file names to
    this one. They do where the file is `local`. A process must not ask for a lock of its own: that
    gives it up.
    """
    try:
        with open_file(file) as stream:
            owner = stream.read(1000).decode(errors="replace")
            try:
                fcntl.lockf(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                return True
    except FileNotFoundError:
        return False
    except OSError:
        return None
    return False if local or f" on {os.uname().nodename}, since " in owner else None


@contextlib.contextmanager
def locked(file: Path, doing: str, patience: float | None = None) -> Iterator[None]:
    """Hold a `lock` in the body. Raises `UserError` as it does."""
    descriptor = lock(file, doing, patience)
    try:
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def own_cores(system: Path = Path("/")) -> int:
    """Return the CPU cores that this process may use: at least 1.

    They are the least of its affinity and of the quotas of its control group and of those above,
    rounded down. `system` is the folder that has /proc and /sys.
    """
    least = float(len(os.sched_getaffinity(0)))
    with contextlib.suppress(OSError, ValueError):  # a system that does not tell
        for line in (system / "proc/self/cgroup").read_text().splitlines():
            # Version 2 names no controllers. A container may see its group at the root.
            _, controllers, path = line.split(":", 2)
            group = PurePath(controllers) / path.lstrip("/")
            for each in (group, *group.parents):
                least = min(least, quota_of(system / "sys/fs/cgroup" / each))
    return max(1, int(least))


def quota_of(group: Path) -> float:
    """Return how many cores' time a control group may use, by version 2 or 1."""
    for names in (["cpu.max"], ["cpu.cfs_quota_us", "cpu.cfs_period_us"]):
        with contextlib.suppress(OSError, ValueError):  # there is no such file; "max"
            quota, period = map(int, " ".join((group / name).read_text() for name in names).split())
            if quota > 0:
                return quota / period
    return math.inf
