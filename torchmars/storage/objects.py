"""Object stores, by fsspec: s3://BUCKET/FOLDER, and gs://, az:// and others alike.

Credentials come from where a store's own tools take them. A store has no folders and renames
nothing. So the files of a checkpoint get their names at once, and the checkpoint is there while it
has its manifest: that is put last, in one request, and goes first.
"""

import contextlib
import errno
import io
import json
import os
import re
import secrets
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path, PurePath
from typing import Any, BinaryIO

from torchmars.cluster import process
from torchmars.core.errors import Unreachable, UserError, in_a_line, missing_package
from torchmars.core.files import PARTIAL
from torchmars.core.places import STORES
from torchmars.storage.storage import (
    DAMAGED,
    MANIFEST,
    WRITTEN,
    Foreign,
    in_use,
    lost,
)

BLOCK = 16 * 2**20  # bytes of a request where a file is read or written from start to end
REQUESTS = 8  # at a time
CHECKPOINT = re.compile(r"step-\d+")  # the name of its folder
# What stays wrong as long as a name or a setting does.
MISTAKES = {errno.EINVAL, errno.ENAMETOOLONG, errno.EREMCHG}
OWNER = "owner"  # the object that names who has a folder


@cache
def connect(root: str, pid: int) -> Any:
    """Return fsspec's file system of a bucket, PROTOCOL://BUCKET.

    Each process has its own, and a fork keeps its parent's alive: closing it there would unregister
    the epoll that both share. Raises `UserError`.
    """
    protocol = root.partition(":")[0]
    try:
        from fsspec.core import url_to_fs

        if protocol == "s3":  # bytes that come altered are asked for again
            from s3fs import core

            core.add_retryable_error(core.botocore.exceptions.FlexibleChecksumError)
        return url_to_fs(root, skip_instance_cache=True, use_listings_cache=False)[0]
    except ImportError:
        raise missing_package(STORES[protocol], f"{protocol}://", protocol) from None
    except Exception as error:  # whatever its client makes of its variables and files
        raise UserError(
            f"{protocol}:// cannot be used ({reason(error)}): set what its own tools need"
        ) from None


def store_of(path: PurePath) -> Any:
    """Return fsspec's file system of the bucket that an object is in. Raises `UserError`."""
    return connect(f"{path.parts[0]}//{path.parts[1]}", os.getpid())


def size_and_time(file: PurePath) -> tuple[int, int]:
    """Return the bytes of a file, and when it was last written to, in ns. Raises `OSError`."""
    if isinstance(file, Path):
        stat = file.stat()
        return stat.st_size, stat.st_mtime_ns
    with reading(file):
        files = store_of(file)
        return files.info(str(file))["size"], int(files.modified(str(file)).timestamp() * 1e9)


class _Object(io.RawIOBase):
    """An object that is read; each read is a request."""

    def __init__(self, path: PurePath) -> None:
        self.path, self.name = path, str(path)
        with reading(path):
            self.file = store_of(path).open(str(path), cache_type="none")

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return int(self.file.seek(offset, whence))

    def readall(self) -> bytes:
        with reading(self.path):
            return bytes(self.file.read())

    def readinto(self, buffer: Any) -> int:
        with reading(self.path):
            return int(self.file.readinto(buffer))


class _NewObject(io.BytesIO):
    """A new object, which is in the store once it is closed."""

    def __init__(self, path: PurePath) -> None:
        super().__init__()
        self.path = path

    def close(self) -> None:
        """Raises `OSError` if the object cannot be written."""
        if self.closed:
            return
        content, files = self.getvalue(), store_of(self.path)
        super().close()
        parts = {"chunksize": BLOCK, "max_concurrency": REQUESTS}
        with writing(self.path):
            files.pipe_file(str(self.path), content, **parts if self.path.parts[0] == "s3:" else {})
            if (arrived := files.info(str(self.path))["size"]) != len(content):
                raise OSError(f"{arrived} of {len(content)} bytes arrived")


@contextlib.contextmanager
def reading(path: PurePath) -> Iterator[None]:
    """Raise a `UserError`, mostly `Unreachable`, for all that a store raises.

    But an object that is missing stays a `FileNotFoundError`.
    """
    try:
        yield
    except UserError:
        raise
    except FileNotFoundError:
        raise FileNotFoundError(errno.ENOENT, "there is no such object", str(path)) from None
    except Exception as error:
        kind = type(error).__name__  # those of S3's client are no classes of Python's
        refused = isinstance(error, PermissionError | ValueError) or "Credential" in kind
        if refused or getattr(error, "errno", None) in MISTAKES or kind == "ParamValidationError":
            raise UserError(
                f"{path}: the store or its client refuses ({reason(error)}): mend the name, the "
                "credentials or the settings, where the store's own tools read them"
            ) from None
        raise Unreachable(
            f"{path} cannot be read ({reason(error)}): see that the store answers, and start again"
        ) from None


@contextlib.contextmanager
def writing(path: PurePath) -> Iterator[None]:
    """Raise an `OSError` with its reason for whatever a store raises."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise OSError(errno.EIO, reason(error), str(path)) from None


def reason(error: Exception) -> str:
    """Return a store's error in one line, without what may be credentials."""
    return in_a_line(error) or type(error).__name__


class StoreOwner:
    """The owner of a folder in an object store. A former process of the same run is over.

    The lock of the run's own folder, which this process has, says so.
    """

    def __init__(self, folder: PurePath, run_id: str) -> None:
        """Take `folder` for a run. Raises `UserError` if another run has it, and `Unreachable`."""
        self.file, self.files = folder / OWNER, store_of(folder)
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        me = f"process {os.getpid()} on {process.node()}, since {since}"
        self.me = {"run": run_id, "process": me, "id": secrets.token_hex(8)}
        found = self._read()
        if not found:
            with contextlib.suppress(Exception):  # not all stores can do this
                self._write(mode="create")
            found = self._read()
        if found and found.get("run") != self.me["run"]:
            raise in_use(
                folder, str(found.get("process")), f" or, if it is over, delete {self.file}"
            )
        if found != self.me:
            with reading(self.file):
                self._write()

    def check(self) -> None:
        """Raise `LostOwnership` if another process has taken the folder, or `Unreachable`."""
        found = self._read()
        if found and "id" not in found:  # it may have been spoiled on its way
            raise Unreachable(f"{self.file} cannot be read: it is none of this program's")
        if found.get("id") != self.me["id"]:
            raise lost(self.file, found.get("process", "somebody who deleted it"))

    def release(self) -> None:
        """Let other runs have the folder."""
        with contextlib.suppress(UserError, OSError):
            self.check()
            with writing(self.file):
                self.files.rm_file(str(self.file))

    def _read(self) -> dict[str, str]:
        """Return the owner's file: empty if there is none, without an id if it is damaged."""
        try:
            with reading(self.file):
                content = self.files.cat_file(str(self.file))
            found = json.loads(content)
        except FileNotFoundError:
            return {}
        except ValueError:
            found = None
        return found if isinstance(found, dict) else {"process": "an unknown process"}

    def _write(self, **options: str) -> None:
        self.files.pipe_file(str(self.file), json.dumps(self.me).encode(), **options)


class ObjectStorage:
    """Folders of object stores, with the methods of `LocalStorage`.

    A checkpoint without a manifest is listed with the suffix that a local one would have.
    """

    file_size = 2**26  # a file is in memory until it is there

    def take(self, folder: PurePath, run: Path, run_id: str) -> StoreOwner:
        return StoreOwner(folder, run_id)

    def list(self, folder: PurePath) -> dict[str, bool]:
        listed = entries(folder)
        folders = [name for name in listed if listed[name] and CHECKPOINT.fullmatch(name)]
        with ThreadPoolExecutor(REQUESTS) as pool:
            there = pool.map(lambda name: is_published(folder / name), folders)
            for name, published in zip(folders, there):
                if not published:
                    del listed[name]
                    if name + DAMAGED not in listed:
                        listed[name + PARTIAL] = True
        return listed

    def open(self, file: PurePath) -> BinaryIO:
        return io.BufferedReader(_Object(file), BLOCK)

    def stage(self, checkpoint: PurePath) -> PurePath:
        with contextlib.suppress(Foreign):  # others' files stay beside those of the new one
            self.delete(checkpoint)  # one that the run could not resume from
        return checkpoint

    def create(self, file: PurePath) -> BinaryIO:
        return _NewObject(file)

    def publish(self, staged: PurePath, checkpoint: PurePath, manifest: str) -> None:
        with writing(checkpoint):
            store_of(checkpoint).pipe_file(str(checkpoint / MANIFEST), manifest.encode())

    def set_aside(self, checkpoint: PurePath) -> None:
        """Keep the manifest under another name, beside the checkpoint."""
        files, manifest = store_of(checkpoint), str(checkpoint / MANIFEST)
        content = b""
        with contextlib.suppress(Exception):  # it may be the damaged file
            content = files.cat_file(manifest)
        with writing(checkpoint):
            files.pipe_file(f"{checkpoint}{DAMAGED}", content)
            files.rm_file(manifest)

    def delete(self, path: PurePath) -> None:
        files, checkpoint = store_of(path), path.with_suffix("")
        names = entries(checkpoint).keys() - {checkpoint.name}  # some tools make such an object
        own = {name for name in names if WRITTEN.fullmatch(name)}
        with writing(path), ThreadPoolExecutor(REQUESTS) as pool:
            for file in (str(checkpoint / MANIFEST), f"{checkpoint}{DAMAGED}"):
                with contextlib.suppress(FileNotFoundError):
                    files.rm_file(file)
            list(pool.map(lambda name: files.rm_file(str(checkpoint / name)), own - {MANIFEST}))
        if names - own:
            raise Foreign(checkpoint, names - own)


def entries(folder: PurePath) -> dict[str, bool]:
    """Return the names in a folder of a store, and whether each is a folder.

    Raises `UserError` where there is no such bucket, and `Unreachable`.
    """
    with reading(folder):
        files = store_of(folder)
        try:
            found = files.ls(str(folder), detail=True)
        except FileNotFoundError:
            try:
                files.find(str(folder))
            except FileNotFoundError as error:
                raise UserError(
                    f"{folder}: {reason(error)}: make it, or name another one"
                ) from None
            return {}
    return {
        each["name"].rstrip("/").rpartition("/")[2]: each["type"] == "directory" for each in found
    }


def is_published(checkpoint: PurePath) -> bool:
    """Return whether a checkpoint has its manifest. One without will be deleted."""
    with contextlib.suppress(FileNotFoundError), reading(checkpoint):
        return bool(store_of(checkpoint).info(str(checkpoint / MANIFEST)))
    return False


OBJECTS = ObjectStorage()
