"""Writes the tensors of checkpoints, each rank its own part, by a plan that is made once."""

import contextlib
import dataclasses
import math
import os
import pickle
from collections.abc import Iterator
from pathlib import PurePath
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, FileSystem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from torchmars.checkpoint.reader import INDEX, first_reason
from torchmars.core.errors import UserError
from torchmars.parallel.layout import Layout
from torchmars.storage import storage_of
from torchmars.storage.storage import File, NewFile


@contextlib.contextmanager
def reporting_disk_errors() -> Iterator[None]:
    """Raise a `UserError` for an `OSError`, so that all ranks report the same."""
    try:
        yield
    except OSError as error:
        raise UserError(error.strerror) from None


@dataclasses.dataclass(frozen=True)
class _Plan:
    """A rank's save plan, and where it put each chunk."""

    tensors: SavePlan
    """The chunks that this rank has."""
    mine: SavePlan
    """The ones that it writes, and to which file."""
    places: list[WriteResult]
    """Where in the file each lies."""
    index: bytes
    """Of the whole checkpoint; empty but on the first rank."""


class TensorWriter:
    """Writes the tensors of a run's checkpoints. Every rank makes the same calls.

    Which rank writes what is DCP's plan. The first rank makes it in Python, of the chunks of all
    ranks: seconds of work on 64 ranks. So the plan of the first checkpoint, and its index, are kept
    for those that follow, as long as all ranks have the same chunks and these take the same bytes.
    DCP's own cache of plans is not used: it is one for all runs of a process, overlooks another
    dtype (torch 2.11 to 2.15: the index then has the one before, and the checkpoint cannot be
    read), outlives a failed save (torch 2.11), and the index is put together for each checkpoint.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.plan: _Plan | None = None
        """Kept on all ranks or on none."""

    def write(self, state: dict[str, Tensor], staged: PurePath) -> dict[str, File]:
        """Write `state`, and the index, to the folder `staged`. Raises `UserError` on every rank.

        `state` is a rank's part, by name. Returns size and checksum of the files of all ranks.
        """
        files = _TensorFiles(staged)
        self._write(state, files)
        parts = self.layout.gather(files.describe)
        return {name: file for part in parts for name, file in part.items()}

    def _write(self, state: dict[str, Tensor], files: "_TensorFiles") -> None:
        planner = DefaultSavePlanner()
        planner.set_up_planner(state, is_coordinator=self.layout.first)
        tensors = planner.create_local_plan()
        plan = self.plan
        if plan and self.layout.agree(lambda: files.write_again(plan, tensors, planner)):
            return
        self.plan = None
        try:
            dcp.save(
                state, storage_writer=files, planner=planner, process_group=self.layout.control
            )
        except CheckpointException as error:  # not an Exception
            raise UserError(first_reason(error)) from None
        self.plan = _Plan(tensors, files.mine, files.places, files.index)


class _TensorFiles(dcp.FileSystemWriter):
    """DCP's writer to a storage. It keeps the plan that it is given, and raises the disk's errors.

    The index does not name its folder. So it is the same for all checkpoints of a plan.
    """

    mine: SavePlan
    places: list[WriteResult]
    index = b""

    def __init__(self, staged: PurePath) -> None:
        super().__init__(str(staged), sync_files=False)  # the storage does
        self.files = self.fs = _StagedFiles(staged)

    def describe(self) -> dict[str, File]:
        """Return size and checksum of this rank's files, by name."""
        return {name: file.describe() for name, file in sorted(self.files.created.items())}

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        self.mine = plan
        size = sum(
            math.prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize
            for item in plan.items
            if item.tensor_data
        )
        # DCP makes a file for each of its threads.
        self.thread_count = max(1, math.ceil(size / self.files.storage.file_size))
        try:
            written = super().write_data(plan, planner)
        except RuntimeError as error:  # of torch.save, which only says at which byte it ended
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise
        self.places = written.value()
        return written

    def _write_data(self, *args: Any) -> Future[list[WriteResult]]:
        # One thread writes all files: an error in another thread of DCP's would be lost.
        self.thread_count = 1
        return super()._write_data(*args)

    def finish(self, metadata: dcp.Metadata, results: list[list[WriteResult]]) -> None:
        # As DCP does, which in torch 2.11 gives the places to a copy of `metadata` alone.
        places = {each.index: each.storage_data for of_rank in results for each in of_rank}
        whole = dataclasses.replace(
            metadata, storage_data=places, storage_meta=None, version=CURRENT_DCP_VERSION
        )
        self._write_index(pickle.dumps(whole))

    def _write_index(self, index: bytes) -> None:
        self.index = index
        with self.files.create_stream(INDEX, "wb") as stream:
            stream.write(index)

    @reporting_disk_errors()
    def write_again(self, plan: _Plan, tensors: SavePlan, planner: SavePlanner) -> bool:
        """Write this rank's part, and on the first rank the index, by the `plan` of another time.

        Returns False if that plan, or its index, does not fit `tensors`.
        """
        if tensors != plan.tensors:
            return False
        self.write_data(plan.mine, planner)
        if plan.index:
            self._write_index(plan.index)
        return self.places == plan.places


class _StagedFiles(FileSystem):
    """The files of tensors that DCP writes, on a storage."""

    def __init__(self, staged: PurePath) -> None:
        self.staged, self.storage = staged, storage_of(staged)
        self.created: dict[str, NewFile] = {}

    def create_stream(self, path: str | os.PathLike, mode: str) -> Any:
        name = PurePath(path).name
        self.created[name] = NewFile(self.storage.create(self.staged / name))
        return self.created[name]

    def exists(self, path: str | os.PathLike) -> bool:
        return False

    def mkdir(self, path: str | os.PathLike) -> None: ...
