"""Files on their way to an object store, in the background, from unnamed files of this machine."""

import errno
import io
import tempfile
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import PurePath
from typing import Any, BinaryIO, cast

from torchmars.storage.storage import File, NewFile, NewFiles
from torchmars.storage.stores import Store, writing

UPLOADS = 4  # at a time
PART = 16 * 2**20  # bytes of a larger file that travel in one request
# Else s3fs has 500 MB of each file in memory.
OPTIONS = {"chunksize": PART, "max_concurrency": 2}


class ObjectFiles(NewFiles):
    """New files of a folder in an object store."""

    def __init__(self, store: Store, folder: PurePath, limit: int) -> None:
        """`limit` is as in `Storage.new_files`; a file that is larger waits there alone."""
        self.store, self.folder, self.limit = store, folder, limit
        self.size = max(limit // (2 * UPLOADS), 1)
        self.pool = ThreadPoolExecutor(UPLOADS, thread_name_prefix="upload")
        self.uploads: dict[str, Future[File]] = {}
        self.staged = 0
        self.changed = threading.Condition()

    def create(self, name: str) -> BinaryIO:
        if name in self.uploads:  # it is written again
            self.uploads.pop(name).result()
        with self.changed:
            self.changed.wait_for(lambda: self.staged <= self.limit // 2)
        for upload in self.uploads.values():  # an error ends the save at once
            if upload.done():
                upload.result()
        return cast(BinaryIO, _StagedFile(self, name))

    def finish(self) -> dict[str, File]:
        self.pool.shutdown(wait=True)
        return {name: upload.result() for name, upload in sorted(self.uploads.items())}

    def upload(self, name: str, content: BinaryIO, file: File) -> None:
        """Begin to upload the whole of `content`, and close it then."""
        with self.changed:
            self.staged += file.size
        self.uploads[name] = self.pool.submit(self._upload, name, content, file)

    def _upload(self, name: str, content: BinaryIO, file: File) -> File:
        path = self.folder / name
        files, options = self.store.files, OPTIONS if self.store.protocol == "s3" else {}
        try:
            with content, writing(path):
                files.put_file(f"/proc/self/fd/{content.fileno()}", str(path), **options)
                arrived = files.info(str(path))["size"]
            if arrived != file.size:
                raise OSError(errno.EIO, f"{arrived} of {file.size} bytes arrived", str(path))
            return file
        finally:
            with self.changed:
                self.staged -= file.size
                self.changed.notify_all()


class _StagedFile(NewFile):
    """A file that is uploaded once it is closed, and dropped where an error ends it."""

    def __init__(self, files: ObjectFiles, name: str) -> None:
        super().__init__(cast(BinaryIO, tempfile.TemporaryFile()))
        self.files, self.name = files, name

    def __exit__(self, *exception: Any) -> None:
        if exception[0] is not None:
            self.stream.close()
            io.RawIOBase.close(self)
        super().__exit__(*exception)

    def close(self) -> None:
        if not self.closed:
            io.RawIOBase.close(self)
            self.stream.flush()
            self.files.upload(self.name, self.stream, self.describe())
