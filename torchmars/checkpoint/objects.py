"""Checkpoints in an object store, by fsspec: s3://BUCKET/RUN, and gs://, az:// and others alike.

An object store has no folders and renames nothing. So the files of a checkpoint get their names at
once, and the checkpoint is there while it has its manifest: that is put last, in one request, and
goes first. Credentials come from where the store's own tools take them.
"""

import contextlib
import errno
import io
import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import PurePath
from typing import Any, BinaryIO

from torchmars.checkpoint.storage import DAMAGED, MANIFEST, NewFiles
from torchmars.checkpoint.store_errors import reading, writing
from torchmars.checkpoint.uploads import ObjectFiles
from torchmars.core.errors import UserError, missing_package
from torchmars.core.files import PARTIAL

REQUESTS = 8  # at a time
BLOCK = 16 * 2**20  # bytes of a request at which ranges of a file are not put together any more
# Extras of this package, and what they install, by the protocols of fsspec that need it.
EXTRAS = {
    "s3": ("s3", "s3fs"),
    "gs": ("gs", "gcsfs"),
    "gcs": ("gs", "gcsfs"),
    "az": ("az", "adlfs"),
    "abfs": ("az", "adlfs"),
}


class ObjectStorage:
    """Folders of an object store, `storage.Storage`.

    A checkpoint without a manifest is listed with the suffix that a local one would have.
    """

    def __init__(self, protocol: str) -> None:
        """Raises `UserError` where there is no such store, or its package is missing."""
        self.protocol = protocol
        self.connected: tuple[int, Any] = (0, None)
        with self._of_protocol():
            import fsspec

            fsspec.get_filesystem_class(protocol)

    @property
    def store(self) -> Any:
        """The file system of fsspec, one for each process: a fork cannot use that of another."""
        if self.connected[0] != os.getpid():
            import fsspec

            with self._of_protocol():
                store = fsspec.filesystem(
                    self.protocol, skip_instance_cache=True, use_listings_cache=False
                )
            self.connected = os.getpid(), store
        return self.connected[1]

    def list(self, folder: PurePath) -> dict[str, bool]:
        with reading(folder):
            try:
                found = self.store.ls(str(folder), detail=True)
            except FileNotFoundError:
                self.store.find(str(folder))  # raises another one where the bucket is missing
                return {}
        names = {each["name"].rstrip("/").rpartition("/")[2]: each for each in found}
        folders = [name for name, each in names.items() if each["type"] == "directory"]
        with ThreadPoolExecutor(REQUESTS) as pool:
            there = dict(zip(folders, pool.map(lambda name: self._has(folder / name), folders)))
        listed = {name: False for name in names if name not in there}
        for name, published in there.items():
            if published:
                listed[name] = True
            elif name + DAMAGED not in listed:
                listed[name + PARTIAL] = True
        return listed

    def open(self, file: PurePath) -> BinaryIO:
        with reading(file):
            size = self.store.info(str(file))["size"]
        return io.BufferedReader(_Object(self, file, size), BLOCK)

    def read(self, file: PurePath, ranges: Sequence[tuple[int, int]]) -> Iterator[BinaryIO]:
        """Read ranges that lie side by side by one request, and some requests ahead."""
        blocks: list[list[tuple[int, int]]] = []
        for begin, size in ranges:
            last = blocks[-1] if blocks else []
            if last and sum(last[-1]) == begin and begin + size - last[0][0] <= BLOCK:
                last.append((begin, size))
            else:
                blocks.append([(begin, size)])
        fetched: deque[Future[bytes]] = deque()
        with ThreadPoolExecutor(REQUESTS) as pool:
            ahead = iter(blocks)
            for block in blocks:
                while len(fetched) < REQUESTS and (after := next(ahead, None)):
                    fetched.append(pool.submit(self.fetch, file, after[0][0], sum(after[-1])))
                content = memoryview(fetched.popleft().result())
                for begin, size in block:
                    start = begin - block[0][0]
                    yield io.BytesIO(content[start : start + size])

    def fetch(self, file: PurePath, begin: int, end: int) -> bytes:
        """Return bytes [begin, end) of a file. Raises `OSError` where it has fewer."""
        with reading(file):
            content: bytes = self.store.cat_file(str(file), start=begin, end=end)
        if len(content) != end - begin:
            raise OSError(errno.EIO, f"it has no bytes {begin} to {end}", str(file))
        return content

    def stage(self, checkpoint: PurePath) -> PurePath:
        if self.list(checkpoint):  # one that the run could not resume from
            self.delete(checkpoint)
        return checkpoint

    def new_files(self, staged: PurePath, limit: int) -> NewFiles:
        return ObjectFiles(self, staged, limit)

    def publish(self, staged: PurePath, checkpoint: PurePath, manifest: str) -> None:
        with writing(checkpoint):
            self.store.pipe_file(str(checkpoint / MANIFEST), manifest.encode())

    def set_aside(self, checkpoint: PurePath) -> None:
        """Keep the manifest under another name, beside the checkpoint."""
        manifest = checkpoint / MANIFEST
        with writing(checkpoint):
            self.store.pipe_file(f"{checkpoint}{DAMAGED}", self.store.cat_file(str(manifest)))
            self.store.rm_file(str(manifest))

    def delete(self, path: PurePath) -> None:
        checkpoint = path.with_suffix("")
        with writing(path):
            for file in (str(checkpoint / MANIFEST), f"{checkpoint}{DAMAGED}"):
                with contextlib.suppress(FileNotFoundError):
                    self.store.rm_file(file)
            with contextlib.suppress(FileNotFoundError):
                self.store.rm(str(checkpoint), recursive=True)

    def _has(self, checkpoint: PurePath) -> bool:
        with reading(checkpoint):
            return bool(self.store.exists(str(checkpoint / MANIFEST)))

    @contextlib.contextmanager
    def _of_protocol(self) -> Iterator[None]:
        try:
            yield
        except ImportError:
            name = f"{self.protocol}://"
            if self.protocol not in EXTRAS:
                raise UserError(f"{name} needs a package that fsspec names: install it") from None
            extra, package = EXTRAS[self.protocol]
            raise missing_package(package, name, extra) from None
        except ValueError:
            raise UserError(
                f"{self.protocol}:// is no store that fsspec knows: name s3://, gs:// or az://"
            ) from None


object_storage_of = cache(ObjectStorage)


class _Object(io.RawIOBase):
    """An object that is read by ranges."""

    def __init__(self, storage: ObjectStorage, file: PurePath, size: int) -> None:
        self.storage, self.file, self.size, self.place = storage, file, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self.place = (
            offset + {os.SEEK_SET: 0, os.SEEK_CUR: self.place, os.SEEK_END: self.size}[whence]
        )
        return self.place

    def readinto(self, buffer: Any) -> int:
        end = min(self.size, self.place + len(buffer))
        if end <= self.place:
            return 0
        content = self.storage.fetch(self.file, self.place, end)
        buffer[: len(content)] = content
        self.place = end
        return len(content)
