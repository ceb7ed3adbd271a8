"""Checkpoints in an object store, by fsspec: s3://BUCKET/RUN, and gs://, az:// and others alike.

An object store has no folders and renames nothing. So the files of a checkpoint get their names at
once, and the checkpoint is there while it has its manifest: that is put last, in one request, and
goes first. Credentials come from where the store's own tools take them.
"""

import contextlib
import errno
import io
import re
import zipfile
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import PurePath
from typing import BinaryIO

from torchmars.core.files import PARTIAL
from torchmars.storage.owner import FileOwner, StoreOwner
from torchmars.storage.storage import DAMAGED, MANIFEST, WRITTEN, Foreign
from torchmars.storage.stores import BLOCK, Store, reading, writing
from torchmars.storage.uploads import ObjectFiles

REQUESTS = 8  # at a time
CHECKPOINT = re.compile(r"step-\d+")  # the name of its folder


class ObjectStorage:
    """Folders of an object store, `storage.Storage`.

    A checkpoint without a manifest is listed with the suffix that a local one would have.
    """

    def __init__(self, store: Store) -> None:
        self.store = store

    def take(self, folder: PurePath, run: FileOwner) -> StoreOwner:
        return StoreOwner(self.store, folder, run)

    def list(self, folder: PurePath) -> dict[str, bool]:
        with reading(folder):
            try:
                found = self.store.files.ls(str(folder), detail=True)
            except FileNotFoundError:
                try:
                    self.store.files.find(str(folder))
                except FileNotFoundError:
                    raise FileNotFoundError("The specified bucket does not exist") from None
                return {}
        names = {each["name"].rstrip("/").rpartition("/")[2]: each for each in found}
        folders = [
            name
            for name, each in names.items()
            if each["type"] == "directory" and CHECKPOINT.fullmatch(name)
        ]
        with ThreadPoolExecutor(REQUESTS) as pool:
            there = dict(zip(folders, pool.map(lambda name: self._has(folder / name), folders)))
        listed = {
            name: each["type"] == "directory" for name, each in names.items() if name not in there
        }
        for name, published in there.items():
            if published:
                listed[name] = True
            elif name + DAMAGED not in listed:
                listed[name + PARTIAL] = True
        return listed

    def open(self, file: PurePath) -> BinaryIO:
        return self.store.open(file)

    def archives(self, file: PurePath, ranges: Sequence[tuple[int, int]]) -> Iterator[BinaryIO]:
        """Read ranges that lie side by side by one request, and some requests ahead.

        The files were verified before, but are read again: so the archives' own checksums are
        compared, which torch.load does not.
        """
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
                    fetched.append(pool.submit(self.store.fetch, file, after[0][0], sum(after[-1])))
                content = memoryview(fetched.popleft().result())
                for begin, size in block:
                    start = begin - block[0][0]
                    archive = io.BytesIO(content[start : start + size])
                    if not is_intact(archive):
                        raise OSError(errno.EIO, f"bytes {begin} to {begin + size} were altered")
                    yield archive

    def stage(self, checkpoint: PurePath) -> PurePath:
        if self.list(checkpoint):  # one that the run could not resume from
            with contextlib.suppress(Foreign):  # others' files stay beside those of the new one
                self.delete(checkpoint)
        self._drop_uploads(checkpoint.parent)
        return checkpoint

    def _drop_uploads(self, folder: PurePath) -> None:
        """Give up the parts of a checkpoint's files that a killed process of the run has left.

        No listing has them, and S3 bills them. Other stores forget them by themselves.
        """
        files = self.store.files
        if not hasattr(files, "list_multipart_uploads"):
            return
        with contextlib.suppress(Exception):  # it may be forbidden, and nothing depends on it
            bucket, key, _ = files.split_path(str(folder))
            place = f"{key}/" if key else ""
            own = re.compile(rf"{re.escape(place)}{CHECKPOINT.pattern}/{WRITTEN.pattern}")
            asked = {"Bucket": bucket, "Prefix": f"{place}step-"}
            while True:
                found = files.call_s3("list_multipart_uploads", **asked)
                for each in found.get("Uploads", []):
                    if own.fullmatch(each["Key"]):
                        files.abort_mpu(bucket, each["Key"], each["UploadId"])
                after = {key: found.get(f"Next{key}") for key in ("KeyMarker", "UploadIdMarker")}
                if not (found.get("IsTruncated") and all(after.values())):
                    return
                asked |= after

    def new_files(self, staged: PurePath, limit: int) -> ObjectFiles:
        return ObjectFiles(self.store, staged, limit)

    def publish(self, staged: PurePath, checkpoint: PurePath, manifest: str) -> None:
        with writing(checkpoint):
            self.store.files.pipe_file(str(checkpoint / MANIFEST), manifest.encode())

    def set_aside(self, checkpoint: PurePath) -> None:
        """Keep the manifest under another name, beside the checkpoint."""
        files, manifest = self.store.files, str(checkpoint / MANIFEST)
        content = b""
        with contextlib.suppress(Exception):  # it may be the damaged file
            content = files.cat_file(manifest)
        with writing(checkpoint):
            files.pipe_file(f"{checkpoint}{DAMAGED}", content)
            files.rm_file(manifest)

    def delete(self, path: PurePath) -> None:
        files, checkpoint = self.store.files, path.with_suffix("")
        with writing(path):
            for file in (str(checkpoint / MANIFEST), f"{checkpoint}{DAMAGED}"):
                with contextlib.suppress(FileNotFoundError):
                    files.rm_file(file)
            with ThreadPoolExecutor(REQUESTS) as pool:
                names = self._names(checkpoint)
                own = [str(checkpoint / name) for name in names if WRITTEN.fullmatch(name)]
                list(pool.map(files.rm_file, own))
        if len(own) < len(names):
            raise Foreign(checkpoint, (name for name in names if not WRITTEN.fullmatch(name)))

    def _names(self, folder: PurePath) -> Sequence[str]:
        """Return the names in a folder, of files and folders."""
        own = folder.name
        try:
            found = self.store.files.ls(str(folder), detail=False)
        except FileNotFoundError:
            return []
        names = (name.rstrip("/").rpartition("/")[2] for name in found)
        return [name for name in names if name != own]  # some tools make an object of its name

    def _has(self, checkpoint: PurePath) -> bool:
        """Return whether a checkpoint has its manifest. One without will be deleted."""
        with reading(checkpoint):
            there = self.store.files.exists(str(checkpoint / MANIFEST))
            return bool(there) or MANIFEST in self._names(checkpoint)


def is_intact(archive: io.BytesIO) -> bool:
    """Return whether a file of torch.save matches its own checksums. Rewinds it."""
    try:
        with zipfile.ZipFile(archive) as files:
            return files.testzip() is None
    except zipfile.BadZipFile:
        return False
    finally:
        archive.seek(0)
