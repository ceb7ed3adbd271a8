"""Reads tensors of a checkpoint, each rank its own part. It never runs code that a file brings."""

import itertools
import pickle
import warnings
from pathlib import PurePath
from typing import IO, Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem
from torch.futures import Future

from torchmars.checkpoint.index import tensors_in
from torchmars.checkpoint.manifest import DamagedCheckpoint
from torchmars.storage import storage_of


def read_tensors(folder: PurePath, state: dict[str, Tensor], index: dcp.Metadata) -> None:
    """Fill `state` in place from the checkpoint `folder`, of which `read_index` gave the index.

    Each rank reads what it has a part of by itself: a plan of what all ranks read would pass
    through the first one. Raises `DamagedCheckpoint` where a tensor is missing, of another shape or
    cannot be read.
    """
    try:
        with warnings.catch_warnings():
            # It warns of a single process, which is on purpose.
            warnings.filterwarnings("ignore", message="torch.distributed is")
            dcp.load(state, storage_reader=_TensorReader(folder, index), no_dist=True)
    except CheckpointException as error:
        for exception, _ in error.failures.values():
            if isinstance(exception, DamagedCheckpoint):
                raise exception from None
        raise DamagedCheckpoint(f"{folder} cannot be read: {first_reason(error)}") from None


def first_reason(error: CheckpointException) -> str:
    """Return the first error in one line: an error of the disk, if there is one."""
    exceptions = [exception for exception, _ in error.failures.values()]
    for exception in exceptions:
        if isinstance(exception, OSError) and exception.strerror:
            return exception.strerror
    return f"{type(exceptions[0]).__name__}: {exceptions[0]}"


class _TensorReader(dcp.FileSystemReader):
    """DCP's reader, given the index, that trusts neither shapes nor dtypes of files."""

    def __init__(self, folder: PurePath, index: dcp.Metadata) -> None:
        super().__init__(str(folder))
        self.folder, self.index, self.storage_data = folder, index, index.storage_data
        self.tensors = tensors_in(index)

    def read_metadata(self, *args: Any, **kwargs: Any) -> dcp.Metadata:
        self.index.storage_meta = self.index.storage_meta or StorageMeta()
        self.index.storage_meta.load_id = self.load_id
        return self.index

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        found = [(self.storage_data[item.storage_index], item) for item in plan.items]
        found.sort(key=lambda each: (each[0].relative_path, each[0].offset))
        for file, in_file in itertools.groupby(found, key=lambda each: each[0].relative_path):
            path, items = self.folder / file, list(in_file)
            ranges = [(place.offset, place.length) for place, _ in items]
            try:
                for (_, item), part in zip(items, storage_of(path).archives(path, ranges)):
                    self.fill(planner, item, self.chunk(path, part, item.storage_index))
            except OSError as error:
                raise DamagedCheckpoint(f"{path} cannot be read: {error.strerror}") from None
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def fill(self, planner: LoadPlanner, item: ReadItem, chunk: Tensor) -> None:
        """Fill from a `chunk` the part of a tensor that `item` names. Raises as `read_tensors`."""
        target = planner.resolve_tensor(item).detach()
        if chunk.is_floating_point() != target.is_floating_point():
            raise DamagedCheckpoint(f"{self.folder} has {item.storage_index.fqn} in {chunk.dtype}")
        part = zip(item.storage_offsets, item.lengths)
        target.copy_(chunk[tuple(slice(begin, begin + length) for begin, length in part)])
        planner.commit_tensor(item, target)

    def chunk(self, path: PurePath, stream: IO[bytes], wanted: MetadataIndex) -> Tensor:
        """Read one chunk of the file `path`, from `stream`. Raises `DamagedCheckpoint`."""
        tensor, number = self.tensors[wanted.fqn], wanted.index
        assert number is not None
        try:
            value = torch.load(stream, map_location="cpu", weights_only=True)
        except OSError:
            raise
        except Exception as error:  # whatever damaged bytes make of it
            what = str(error).partition("\n")[0]
            if isinstance(error, pickle.UnpicklingError):  # it advises to unpickle what there is
                what = "nothing else is unpickled"
            raise DamagedCheckpoint(
                f"{path} has no tensor where {wanted.fqn} should be ({what})"
            ) from None
        if (
            not isinstance(value, Tensor)
            or value.layout is not torch.strided
            or value.dtype != tensor.properties.dtype
            or value.shape != tensor.chunks[number].sizes
        ):
            raise DamagedCheckpoint(
                f"{path} has {wanted.fqn} in another shape or dtype than the index says"
            )
        return value
