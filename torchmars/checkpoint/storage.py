"""Where checkpoints lie: what is asked of such a place, and folders of local files."""

import contextlib
import os
from pathlib import Path
from typing import BinaryIO, Protocol

from torchmars.core.files import PARTIAL, DurableFile, open_file, remove, sync_folder, write_durably

MANIFEST = "manifest.json"
# End the names of checkpoints that are to be deleted, or that could not be loaded.
DELETED, DAMAGED = ".deleted", ".damaged"


class Storage(Protocol):
    """A place for checkpoints. A checkpoint is there from `publish` to `delete`, and always whole.

    A crash may leave others, whose names end in PARTIAL, DELETED or DAMAGED. All methods raise
    `OSError`.
    """

    def list(self, folder: Path) -> dict[str, bool]:
        """Return the names in a folder, and whether each is a folder; none where it is missing."""

    def open(self, file: Path) -> BinaryIO:
        """Open a file, of which any range can be read."""

    def stage(self, checkpoint: Path) -> Path:
        """Return the empty folder for the files of a checkpoint that is not published yet."""

    def create(self, file: Path) -> BinaryIO:
        """Open a new file of a staged checkpoint. It is durable once it is closed."""

    def publish(self, staged: Path, checkpoint: Path, manifest: str) -> None:
        """Add the manifest, durably: the checkpoint is there now. One of its name is set aside."""

    def set_aside(self, checkpoint: Path) -> None:
        """Rename a damaged checkpoint, durably."""

    def delete(self, path: Path) -> None:
        """Delete a checkpoint, or what a crash left. Of a linked one delete the link alone."""


class LocalStorage:
    """Folders of local files. A checkpoint is staged under another name, and renamed last."""

    def list(self, folder: Path) -> dict[str, bool]:
        try:
            with os.scandir(folder) as found:
                return {each.name: each.is_dir() for each in found}
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            return {}

    def open(self, file: Path) -> BinaryIO:
        return open_file(file)

    def stage(self, checkpoint: Path) -> Path:
        staged = self._free(checkpoint, PARTIAL)
        staged.mkdir(parents=True)
        return staged

    def create(self, file: Path) -> BinaryIO:
        return DurableFile(file)

    def publish(self, staged: Path, checkpoint: Path, manifest: str) -> None:
        write_durably(staged / MANIFEST, manifest)  # and the names of all files beside it
        if os.path.lexists(checkpoint):  # what the run could not resume from
            self.set_aside(checkpoint)
        staged.rename(checkpoint)
        sync_folder(checkpoint.parent)
        sync_folder(checkpoint.parent.parent)  # the folder of checkpoints may be new

    def set_aside(self, checkpoint: Path) -> None:
        self._rename(checkpoint, DAMAGED)

    def delete(self, path: Path) -> None:
        self.remove(path if path.suffix else self._rename(path, DELETED))

    remove = staticmethod(remove)

    def _rename(self, checkpoint: Path, suffix: str) -> Path:
        target = self._free(checkpoint, suffix)
        checkpoint.rename(target)
        sync_folder(checkpoint.parent)
        return target

    def _free(self, checkpoint: Path, suffix: str) -> Path:
        """Delete what has a checkpoint's name with a suffix, and return that path.

        Return one with a number where it cannot be deleted.
        """
        number, path = 0, checkpoint.with_name(checkpoint.name + suffix)
        while True:
            with contextlib.suppress(OSError):
                self.remove(path)
            if not os.path.lexists(path):
                return path
            number += 1
            path = checkpoint.with_name(f"{checkpoint.name}-{number}{suffix}")


LOCAL = LocalStorage()
