"""Writes checkpoints, one at a time: in the background while training continues, or at once."""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path, PurePath

import torch
from torch import Tensor

from torchmars.checkpoint.folder import check_place, step_folder
from torchmars.checkpoint.manifest import CheckpointManifest
from torchmars.checkpoint.staging import Staging
from torchmars.checkpoint.upkeep import Retention
from torchmars.checkpoint.writer import TensorWriter, reporting_disk_errors
from torchmars.config import ResolvedConfig
from torchmars.config.sections import RunConfig
from torchmars.core.errors import Unreachable, UserError
from torchmars.parallel.layout import Layout
from torchmars.storage import Owner, storage_of
from torchmars.storage.local import FileOwner
from torchmars.storage.storage import LostOwnership

# Seconds after which a thread that runs Python gives way to another that wants to, during a save.
# docs/benchmarks.md#saving-a-checkpoint has the time that training loses to a save.
SWITCH_INTERVAL = 1e-4


@contextlib.contextmanager
def giving_way() -> Iterator[None]:
    """Let other threads have the interpreter sooner than by default, after 5 ms."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_INTERVAL)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


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
        """Raise `LostOwnership` if another process has taken over the run."""
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


class Saver:
    """Writes the checkpoints of a run. Every rank makes the same calls.

    A save is staged, made durable file by file, and published last. So a crash or an error at any
    point leaves the previous checkpoint as the newest. An error is reported and counted: the run
    ends after `checkpoint.max_failures` of them in a row.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        layout: Layout,
        owned: OwnedFolders,
        record: Callable[..., None],
    ) -> None:
        """`owned` names the folders that it may write in.

        `record` is `EventLog.add`, for each checkpoint that is complete. A thread calls it.
        """
        self.config, self.folder, self.owned = config.checkpoint, config.checkpoints, owned
        self.record = record
        # A save's collectives run beside the training's. They need a group of their own: in one
        # group the ranks would mix them up.
        self.layout = layout.with_own_control_group()
        self.tensors = TensorWriter(self.layout)
        self.retention = Retention(config, owned.check, self.layout.say)
        self.staging = Staging(layout.device)
        self.thread: threading.Thread | None = None
        self.error: str | None = None
        self.lost = False  # one of the folders
        self.failures = 0

    @property
    def group(self) -> str:
        """The name of the process group that saves use."""
        return self.layout.control.group_name

    def save(self, manifest: CheckpointManifest, state: dict[str, Tensor]) -> float:
        """Begin to save `state`, or save it if saves are not asynchronous.

        Returns the seconds that training waited for it. Whoever changes the tensors of `state` then
        calls `before_change` first. Raises `UserError` if too many saves in a row have failed.
        """
        began = time.perf_counter()
        self.wait()
        if self.config.async_save:
            copies, complete = self.staging.copy(state)

            def save_copies() -> None:
                with giving_way():
                    self._save(manifest, copies, complete)

            # A daemon: a second signal or a crash must not wait for it.
            self.thread = threading.Thread(target=save_copies, name="checkpoint", daemon=True)
            self.thread.start()
        else:
            self._save(manifest, state)
            self._count()
        return time.perf_counter() - began

    def before_change(self) -> None:
        """Let the change of weights and state that comes wait for a save's copies of them."""
        self.staging.before_change()

    def wait(self) -> None:
        """Wait for the save that is under way, if one is.

        Raises `UserError` if too many saves in a row have failed.
        """
        if self.thread is not None:
            self.thread.join()
            self.thread = None
            self._count()

    def finish(self) -> None:
        """Wait for the run's last save. Raises `UserError` if it failed."""
        self.wait()
        if self.error:
            raise self._end(self.error)
        self.close()

    def close(self) -> None:
        """Let a save that is under way end, whatever comes of it. Let others have the folder."""
        if self.thread is not None:
            self.thread.join()
        self.owned.close()

    def release(self) -> None:
        """Close, and let others have the run's folder before this process ends."""
        self.close()
        self.owned.release()

    def _count(self) -> None:
        self.failures = self.failures + 1 if self.error else 0
        if self.error and self.lost:
            raise self._end(self.error)
        if self.failures >= self.config.max_failures:
            failures = f"checkpoint.max_failures = {self.config.max_failures} in a row"
            raise self._end(f"{self.error}. {failures} ends the run")

    def _end(self, why: str) -> UserError:
        """Return the end of the run with a failed save. A store may answer at the next start."""
        if self.lost:
            return UserError(why)
        if isinstance(self.folder, Path):
            return UserError(f"{why}: make room or set run.folder")
        return Unreachable(f"{why}: see that the store answers, and start again")

    def _save(
        self,
        manifest: CheckpointManifest,
        state: dict[str, Tensor],
        complete: Callable[[], None] = lambda: None,
    ) -> None:
        """Save from beginning to end on the calling thread.

        `complete` waits until `state` is there. `error` gets the outcome, the same on every rank.
        """
        began, folder = time.perf_counter(), step_folder(self.folder, manifest.step)
        self.error = None
        torch.get_device_module(self.layout.device).set_device(self.layout.device)
        try:
            complete()
            written = self._write(manifest, state, folder)
        except Exception as error:
            self.lost = isinstance(error, LostOwnership)
            self.error = (
                f"the checkpoint {folder} could not be written: {' '.join(str(error).split())}"
            )
            if self.layout.first and not self.lost:
                with contextlib.suppress(OSError, UserError):
                    self.retention.clear()  # a full disk needs the space
            self.layout.say(f"warning: {self.error}; the one before stays the newest")
            return
        size, seconds = written.bytes / 2**20, time.perf_counter() - began
        self.layout.say(f"checkpoint {folder} ({size:,.1f} MiB in {seconds:.2f} s)")
        self.record("saved", manifest.step, checkpoint=folder.name, seconds=seconds, mib=size)
        if self.layout.first:
            self.retention.tidy(manifest.step)

    def _write(
        self, manifest: CheckpointManifest, state: dict[str, Tensor], folder: PurePath
    ) -> CheckpointManifest:
        """Write a checkpoint. Return its complete manifest."""
        staged = self.layout.on_first(lambda: self._stage(folder))
        complete = replace(manifest, files=self.tensors.write(state, staged))
        self.layout.on_first(lambda: self._publish(complete, staged, folder))
        return complete

    @reporting_disk_errors()
    def _stage(self, folder: PurePath) -> PurePath:
        """Return the folder that `folder` is until it is complete."""
        self.retention.clear()
        return storage_of(self.folder).stage(folder)

    @reporting_disk_errors()
    def _publish(self, manifest: CheckpointManifest, staged: PurePath, folder: PurePath) -> None:
        self.owned.check()
        storage_of(self.folder).publish(staged, folder, manifest.text())
