"""The folders that a run's process owns: the run's, and the folder of its checkpoints."""

from pathlib import PurePath

from torchmars.checkpoint.folder import check_place
from torchmars.config.run import RunConfig
from torchmars.core.errors import UserError
from torchmars.parallel.layout import Layout
from torchmars.storage import storage_of
from torchmars.storage.local import FileOwner
from torchmars.storage.storage import Owner


class OwnedFolders:
    """The folders that the first rank has taken; it writes for all ranks."""

    def __init__(self) -> None:
        self.run: FileOwner | None = None
        self.checkpoints: Owner | None = None
        """None also where the folder of the run has the checkpoints."""

    def take(self, layout: Layout, run: RunConfig, checkpoints: PurePath) -> None:
        """Keep other processes from the folder of the `run`, and other runs from its `checkpoints`.

        Raises `UserError` on every rank.
        """
        layout.on_first(lambda: check_place(checkpoints, run.path))
        layout.on_first(run.check_links)
        self.run = layout.only_first(lambda: FileOwner(run.lock, f"training the run {run.path}"))
        try:
            self.checkpoints = layout.only_first(
                lambda: (
                    self.run and storage_of(checkpoints).take(checkpoints, run.path, self.run.id)
                )
            )
        except UserError:  # a program may go on
            self.release()
            raise

    def check_run(self) -> None:
        """Raise `LostOwnership` if another process has taken over the run.

        This one stood still meanwhile.
        """
        if self.run is not None:
            self.run.check()

    def check(self) -> None:
        """Raise `LostOwnership`, and `Unreachable` where a store does not answer."""
        self.check_run()
        if self.checkpoints is not None:
            self.checkpoints.check()

    def close(self) -> None:
        """Let other runs have the checkpoints, and the run's folder when this process ends."""
        if self.checkpoints is not None:
            self.checkpoints.release()
            self.checkpoints = None

    def release(self) -> None:
        """Let others have both folders before this process ends."""
        self.close()
        if self.run is not None:
            self.run.release()
            self.run = None
