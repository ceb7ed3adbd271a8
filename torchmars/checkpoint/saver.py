"""Writes checkpoints, one at a time: in the background while training goes on, or at once."""

import contextlib
import os
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import SavePlan, SavePlanner
from torch.distributed.checkpoint._state_dict_stager import (
    StateDictStager,
)  # torch 2.11 to 2.13; in 2.11 the public DefaultStager works once only
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from torchmars.checkpoint import manifest as manifests
from torchmars.checkpoint.folder import (
    DAMAGED,
    checkpoints,
    delete_all,
    dispensable,
    leftovers,
    set_aside,
    step_folder,
    step_of,
    vacated,
)
from torchmars.checkpoint.manifest import CheckpointManifest, DamagedCheckpoint
from torchmars.checkpoint.state import reason
from torchmars.config import ResolvedConfig
from torchmars.core.errors import UserError
from torchmars.core.files import PARTIAL, sync_folder
from torchmars.core.formats import OtherVersion
from torchmars.parallel.layout import Layout


class Saver:
    """Writes the checkpoints of a run. Every rank makes the same calls.

    A save is written aside, made durable file by file, and renamed last: a crash or an error at any point leaves the previous
    checkpoint as the newest. An error is reported and counted; the run ends after `checkpoint.max_failures` of them in a row.
    """

    def __init__(self, config: ResolvedConfig, layout: Layout) -> None:
        self.config, self.folder = config.checkpoint, config.run.checkpoints
        # Collectives of a save run beside those of the training: in a group of their own, or they would be taken for each other.
        self.layout = layout.aside()
        self.on_gpu = layout.device.type == "cuda"
        self.stager = StateDictStager(pin_memory=self.on_gpu)  # keeps its copies to be filled again
        self.thread: threading.Thread | None = None
        self.error: str | None = None
        self.failures = 0
        self.stuck: list[Path] = []  # what could not be deleted, and is told once
        self.saved_at = time.monotonic()

    @property
    def group(self) -> str:
        """Name of the process group that saves use."""
        return self.layout.control.group_name

    def overdue(self) -> bool:
        """Whether checkpoint.interval_minutes have passed since the last save, by the first rank's clock."""
        minutes = self.config.interval_minutes
        return (
            self.layout.first and minutes > 0 and time.monotonic() - self.saved_at >= 60 * minutes
        )

    def save(self, manifest: CheckpointManifest, state: dict[str, Tensor]) -> float:
        """Begin to save `state`, or save it if saves are not asynchronous; returns the seconds that training waited for it.

        What `state` holds may change as soon as this returns. Raises `UserError` where too many saves in a row have failed.
        """
        began = time.perf_counter()
        self.wait()
        self.saved_at = time.monotonic()
        if self.config.async_save:
            state = self.stager.stage(state, non_blocking=self.on_gpu)
            if self.on_gpu:
                torch.cuda.synchronize()
            # A daemon: a second signal or a crash must not wait for it.
            self.thread = threading.Thread(
                target=self._save, args=(manifest, state), name="checkpoint", daemon=True
            )
            self.thread.start()
        else:
            self._save(manifest, state)
            self._count()
        return time.perf_counter() - began

    def wait(self) -> None:
        """Return once no save is under way. Raises `UserError` where too many saves in a row have failed."""
        if self.thread is not None:
            self.thread.join()
            self.thread = None
            self._count()

    def finish(self) -> None:
        """Wait for the run's last save. Raises `UserError` where it failed."""
        self.wait()
        if self.error:
            raise UserError(self.error)

    def close(self) -> None:
        """Let a save that is under way end, whatever comes of it."""
        if self.thread is not None:
            self.thread.join()

    def _count(self) -> None:
        self.failures = self.failures + 1 if self.error else 0
        if self.failures >= self.config.max_failures:
            raise UserError(
                f"{self.error}. checkpoint.max_failures = {self.config.max_failures} in a row ends the run: make room or set run.folder"
            )

    def _save(self, manifest: CheckpointManifest, state: dict[str, Tensor]) -> None:
        """One save from beginning to end, on the calling thread; the outcome, the same on every rank, goes to `error`."""
        began, folder = time.perf_counter(), step_folder(self.folder, manifest.step)
        self.error = None
        if self.on_gpu:
            torch.cuda.set_device(self.layout.device)  # a thread begins with the first GPU
        try:
            written = self._write(manifest, state, folder)
        except Exception as error:
            self.error = (
                f"the checkpoint {folder} could not be written: {' '.join(str(error).split())}"
            )
            if self.layout.first:
                with contextlib.suppress(OSError):
                    self._clear()  # a full disk needs the space
            self.layout.say(f"warning: {self.error}; the one before stays the newest")
            return
        self.layout.say(
            f"checkpoint {folder} ({written.bytes / 2**20:,.1f} MiB in {time.perf_counter() - began:.2f} s)"
        )
        if self.layout.first:
            self._tidy(manifest.step)

    def _write(
        self, manifest: CheckpointManifest, state: dict[str, Tensor], folder: Path
    ) -> CheckpointManifest:
        @_in_plain_words()
        def begin() -> Path:
            self._clear()
            partial = vacated(folder.with_name(folder.name + PARTIAL))
            partial.mkdir(parents=True)
            return partial

        @_in_plain_words()
        def mine() -> dict[str, manifests.File]:
            names = [path.name for path in partial.glob(f"__{self.layout.world.rank}_*")]
            if self.layout.first:
                names.append(".metadata")
            return {name: manifests.describe(partial / name) for name in names}

        @_in_plain_words()
        def publish() -> CheckpointManifest:
            complete = replace(
                manifest,
                files={name: file for part in parts for name, file in sorted(part.items())},
            )
            complete.write(partial)
            if os.path.lexists(folder):  # what the run could not go on from
                set_aside(folder, DAMAGED)
            partial.rename(folder)
            for parent in (
                self.folder,
                self.folder.parent,
            ):  # the second: the folder of checkpoints may be new
                sync_folder(parent)
            return complete

        partial = self.layout.on_first(begin)
        try:
            # DCP flushes each file to the disk; the manifest does the same for their names.
            writer = _TensorWriter(partial)
            dcp.save(state, storage_writer=writer, process_group=self.layout.control)
        except CheckpointException as error:  # not an Exception
            raise UserError(reason(error)) from None
        parts = self.layout.agree(mine)
        return self.layout.on_first(publish)

    def _clear(self) -> None:
        """Delete what crashed or failed saves and deletions left."""
        self._delete(path for path in leftovers(self.folder) if path.suffix != DAMAGED)

    def _tidy(self, step: int) -> None:
        """Delete the checkpoints that need not be kept, now that a newer one is durable.

        Those of another version stay: what they are is not known here.
        """
        try:
            steps: list[int] = []
            losses: dict[int, float] = {}
            for path in checkpoints(self.folder):
                if step_of(path) > step:  # the run went back behind it, so it could not be loaded
                    set_aside(path, DAMAGED)
                    continue
                try:
                    loss = manifests.read(path).validation_loss
                except OtherVersion:
                    continue
                except DamagedCheckpoint:
                    loss = None
                steps.append(step_of(path))
                losses |= {} if loss is None else {step_of(path): loss}
            old = dispensable(steps, losses, self.config)
            self._delete(step_folder(self.folder, step) for step in old)
        except OSError as error:
            self.layout.say(f"warning: cannot tidy {self.folder}: {error}")

    def _delete(self, paths: Iterable[Path]) -> None:
        """Delete what can be deleted, and warn once of what cannot."""
        paths = [path for path in paths if path not in self.stuck]
        self.stuck += delete_all(paths, self.layout.say)


class _TensorWriter(dcp.FileSystemWriter):
    """DCP's writer, but it says why the disk refused; torch.save only where its archive ends."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise


@contextlib.contextmanager
def _in_plain_words() -> Iterator[None]:
    """Make what the disk refuses a `UserError`, which all ranks then say alike."""
    try:
        yield
    except OSError as error:
        raise UserError(error.strerror) from None
