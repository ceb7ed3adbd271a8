"""Object stores, by fsspec: s3://BUCKET/FOLDER, and gs://, az:// and others alike.

Credentials come from where a store's own tools take them: its variables, files and roles.
"""

import contextlib
import errno
import io
import os
import re
from collections.abc import Iterator
from functools import cache
from glob import has_magic
from pathlib import Path, PurePath
from typing import Any, BinaryIO

from torchmars.core.errors import Unreachable, UserError, missing_package
from torchmars.core.places import ObjectPath

BLOCK = 16 * 2**20  # bytes of a request where a file is read from its begin to its end
# Extras of this package, and what they install, by the protocols of fsspec that need it.
EXTRAS = {
    "s3": ("s3", "s3fs"),
    "gs": ("gs", "gcsfs"),
    "gcs": ("gs", "gcsfs"),
    "az": ("az", "adlfs"),
    "abfs": ("az", "adlfs"),
}
ATTEMPTS = 3  # to read bytes that come altered
NO_BUCKET = re.compile("bucket does not exist|container does not exist", re.IGNORECASE)
# When an object was last written to, in what the stores say of one.
CHANGED = ("LastModified", "mtime", "updated", "last_modified")
# How the names end of variables that hold what nobody may read.
SECRETS = ("KEY", "KEY_ID", "TOKEN", "SECRET", "PASSWORD")


class Altered(UserError):
    """The store's own checksum does not match what has come."""


class Store:
    """An object store. Every process has its own connection: a fork cannot use another's."""

    def __init__(self, protocol: str) -> None:
        """Raises `UserError` where there is no such store, or its package is missing."""
        self.protocol = protocol
        # By process. That of a parent is kept: were it collected in the child, it would let the
        # parent's own loop forget its connections, whose epoll both have.
        self.connections: dict[int, Any] = {}
        self.files  # noqa: B018, connects

    @property
    def files(self) -> Any:
        """The file system of fsspec."""
        own = os.getpid()
        if own not in self.connections:
            self.connections[own] = self._connect()
        return self.connections[own]

    def open(self, file: PurePath) -> BinaryIO:
        """Open an object, of which any range can be read. Raises `OSError` and `Unreachable`."""
        with reading(file):
            size = self.files.info(str(file))["size"]
        return io.BufferedReader(_Object(self, file, size), BLOCK)

    def glob(self, pattern: str) -> list[PurePath]:
        """Return the objects that a pattern or a name has, or all in a folder of the name.

        Raises `Unreachable`.
        """
        path = ObjectPath(pattern)
        with reading(path):
            look = self.files.glob if has_magic(pattern) else self.files.find
            found = look(pattern, detail=True)
        # A wildcard matches folders too, and some stores have an object for one.
        return [
            ObjectPath(f"{self.protocol}://{name}")
            for name, about in found.items()
            if about["type"] == "file" and not name.endswith("/")
        ]

    def describe(self, file: PurePath) -> tuple[int, int]:
        """Return size and time of last change in ns. Raises `OSError` and `Unreachable`."""
        with reading(file):
            found = self.files.info(str(file))
        times = [found[key].timestamp() for key in CHANGED if hasattr(found.get(key), "timestamp")]
        return found["size"], int(max(times, default=0) * 1e9)

    def fetch(self, file: PurePath, begin: int, end: int) -> bytes:
        """Return bytes [begin, end) of an object. Raises `OSError` where it has fewer."""
        for attempt in range(ATTEMPTS):
            try:
                with reading(file):
                    content: bytes = self.files.cat_file(str(file), start=begin, end=end)
                break
            except Altered:  # its own client does not ask again
                if attempt == ATTEMPTS - 1:  # the store itself has it so
                    raise OSError(
                        errno.EIO, "its bytes are not those that were written", str(file)
                    ) from None
        if len(content) != end - begin:
            raise OSError(errno.EIO, f"it has no bytes {begin} to {end}", str(file))
        return content

    def _connect(self) -> Any:
        name = f"{self.protocol}://"
        try:
            import fsspec

            return fsspec.filesystem(
                self.protocol, skip_instance_cache=True, use_listings_cache=False
            )
        except ImportError:
            if self.protocol not in EXTRAS:
                raise UserError(f"{name} needs a package that fsspec names: install it") from None
            extra, package = EXTRAS[self.protocol]
            raise missing_package(package, name, extra) from None
        except ValueError:
            raise UserError(
                f"{name} is no store that fsspec knows: name s3://, gs:// or az://"
            ) from None


def store_of(path: PurePath) -> Store:
    """Return the store of an object. Raises `UserError`."""
    return store_by_name(path.parts[0].removesuffix(":"))


store_by_name = cache(Store)


def size_and_time(file: PurePath) -> tuple[int, int]:
    """Return the bytes of a file, and when it was last written to, in ns. Raises `OSError`."""
    if not isinstance(file, Path):
        return store_of(file).describe(file)
    stat = file.stat()
    return stat.st_size, stat.st_mtime_ns


class _Object(io.RawIOBase):
    """An object that is read by ranges."""

    def __init__(self, store: Store, file: PurePath, size: int) -> None:
        self.store, self.file, self.size, self.place = store, file, size, 0
        self.name = str(file)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self.place = (
            offset + {os.SEEK_SET: 0, os.SEEK_CUR: self.place, os.SEEK_END: self.size}[whence]
        )
        return self.place

    def readall(self) -> bytes:
        content = self.store.fetch(self.file, self.place, self.size)
        self.place = self.size
        return content

    def readinto(self, buffer: Any) -> int:
        end = min(self.size, self.place + len(buffer))
        if end <= self.place:
            return 0
        content = self.store.fetch(self.file, self.place, end)
        buffer[: len(content)] = content
        self.place = end
        return len(content)


@contextlib.contextmanager
def reading(path: PurePath) -> Iterator[None]:
    """Raise a `UserError`, mostly `Unreachable`, for all that a store raises.

    But an object that is missing stays a `FileNotFoundError`.
    """
    try:
        yield
    except (UserError, GeneratorExit):
        raise
    except FileNotFoundError as error:
        if NO_BUCKET.search(str(error)):
            raise UserError(f"{path}: {reason(error)}: make it, or name another one") from None
        raise FileNotFoundError(errno.ENOENT, "there is no such object", str(path)) from None
    except Exception as error:
        if "Checksum" in type(error).__name__:
            raise Altered(f"{path}: what comes is not what was written ({reason(error)})") from None
        if isinstance(error, PermissionError) or "Credentials" in type(error).__name__:
            raise UserError(
                f"{path}: the store refuses ({reason(error)}): give it credentials that may use "
                "the folder, where its own tools take them"
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
    """Return in one line what a store says is wrong. It never holds credentials."""
    text = " ".join(str(error).split()) or type(error).__name__
    for name, value in os.environ.items():
        if len(value) >= 8 and name.endswith(SECRETS):
            text = text.replace(value, "...")
    return text
