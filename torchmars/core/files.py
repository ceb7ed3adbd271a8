"""Files that users bring, and files that survive a crash."""

import errno
import hashlib
import io
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path, PurePath
from typing import BinaryIO, Literal

from torchmars.core.errors import UserError

PARTIAL = ".partial"  # ends the name of an incomplete file or folder
DEEPEST = 200  # folders within each other; Python makes them by as many calls within each other
LFS = b"version https://git-lfs"  # begins what Git leaves instead of a large file
LARGEST = 2**30  # bytes of a text file that is read whole


def name_problem(path: PurePath | str) -> str:
    """Return why nothing can have this path; an empty text where something can."""
    if os.fspath(path).count("/") > DEEPEST:
        return f"it has more than {DEEPEST} folders within each other"
    try:
        os.lstat(path)
    except OSError as error:
        return os.strerror(error.errno) if error.errno == errno.ENAMETOOLONG else ""
    except ValueError:  # a NUL character, or half of one that UTF-16 has in two
        return "it has characters that no path can have"
    return ""


def path_problem(path: PurePath | str, kind: Literal["file", "folder"]) -> str:
    """Return why `path` cannot be a regular file or a folder; an empty text where it can.

    It need not exist.
    """
    if wrong := name_problem(path):
        return wrong
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return ""
    except OSError as error:
        return error.strerror or str(error)
    if kind == "folder":
        return "" if stat.S_ISDIR(mode) else os.strerror(errno.ENOTDIR)
    if stat.S_ISDIR(mode):
        return os.strerror(errno.EISDIR)
    return "" if stat.S_ISREG(mode) else "Not a regular file"


def check_writable(folder: Path, option: str = "run.folder") -> None:
    """Raise `UserError` if nothing can be written in a folder that `option` decides on.

    It need not exist: then it is tried where it would be made. Nothing is left behind.
    """
    there = folder
    while not os.path.lexists(there):
        there = there.parent
    try:
        if not (wrong := path_problem(folder, "folder")):
            with tempfile.TemporaryFile(dir=there):
                return
    except OSError as error:
        wrong = error.strerror or str(error)
    raise UserError(f"cannot write to {folder}: {wrong}: set {option} to a folder you can write")


def open_file(path: PurePath) -> BinaryIO:
    """Open a regular file to be read. Raises `OSError` for anything else.

    Anything else is not even opened: whoever opens a FIFO waits for its other end.
    """
    if wrong := path_problem(path, "file"):
        raise OSError(errno.EINVAL, wrong, str(path))
    return Path(path).open("rb")


def read_bytes(path: PurePath, open: Callable[[PurePath], BinaryIO] = open_file) -> bytes:
    """Return the content of a regular file. Raises `OSError` for anything else."""
    with open(path) as stream:
        content = stream.read(LARGEST + 1)
    if len(content) > LARGEST:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
    return content


def read_text(path: Path) -> str:
    """Return the text of a regular file in UTF-8, without a byte order mark.

    Raises `OSError` and `UnicodeDecodeError`.
    """
    return read_bytes(path).decode("utf-8-sig")


def open_to_write(path: str | PurePath, flags: int) -> int:
    """Return the descriptor of a regular file, which is made if there is none, to write to it.

    It is an `opener` of `open` too. Raises `OSError` for a link, which may lead to a file of
    somebody else, and for anything that is no file.
    """
    if os.path.islink(path):
        raise OSError(errno.ELOOP, f"{PurePath(path).name} is a link", str(path))
    # Not blocking: else whoever opens a FIFO waits for its other end.
    flags |= os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
    descriptor = os.open(path, flags, 0o666)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, "Not a regular file", str(path))


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


def sha256(file: Path, begin: int = 0, end: int = 2**63) -> str:
    """Return the SHA-256 of bytes [begin, end) of a file. Raises `OSError`."""
    result = hashlib.sha256()
    for chunk in read_chunks(file, begin, end):
        result.update(chunk)
    return result.hexdigest()


def read_chunks(file: Path, begin: int, end: int, size: int = 2**22) -> Iterator[bytes]:
    """Yield bytes [begin, end) of a file in chunks of `size` bytes, or as many as there are.

    Raises `OSError`.
    """
    with open_file(file) as stream:
        stream.seek(begin)
        while begin < end and (chunk := stream.read(min(size, end - begin))):
            yield chunk
            begin += len(chunk)


def remove(path: Path) -> None:
    """Delete a file, a folder with its contents, or a link; never the target of a link."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def is_at(descriptor: int, path: Path) -> bool:
    """Return whether an open file is the one at `path`, and not one that was deleted or moved.

    Where the file system cannot be asked just now, it counts as being there.
    """
    try:
        there, here = os.stat(path), os.fstat(descriptor)
    except OSError as error:
        return not isinstance(error, FileNotFoundError)
    return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)


def is_gone(file: PurePath) -> bool:
    """Return whether a file that existed does not exist any more.

    Where the file system cannot be asked just now, it counts as existing.
    """
    try:
        os.stat(file)
    except OSError as error:
        return isinstance(error, FileNotFoundError)
    return False
