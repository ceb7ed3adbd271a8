"""Reads checkpoints: the index, and of each tensor a rank's part. No code of a file is run.

The index has the tensors, the chunks of each, and where every chunk lies. Its SHA-256 is in the
manifest. So its numbers are those of the save, and are not checked again, but that no part of a
tensor is missing.
"""

import contextlib
import gc
import hashlib
import io
import math
import os
import pickle
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path, PurePath
from typing import IO, Any

import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import StorageMeta, TensorStorageMetadata

from torchmars.checkpoint.manifest import CheckpointManifest, DamagedCheckpoint
from torchmars.core.errors import UserError
from torchmars.storage import storage_of
from torchmars.storage.storage import File

INDEX = ".metadata"


def read_index(folder: PurePath, manifest: CheckpointManifest) -> dcp.Metadata:
    """Return DCP's index of the tensors in the checkpoint `folder`, whose `manifest` is given.

    Raises `DamagedCheckpoint` if it is missing, not an index of whole tensors, or names a file that
    the manifest does not.
    """
    path = folder / INDEX
    try:
        with storage_of(path).open(path) as stream:
            content = stream.read()
        if hashlib.sha256(content).hexdigest() != manifest.files[INDEX].sha256:
            raise ValueError("its SHA-256 is not the manifest's")
        with without_garbage_collection():
            index: dcp.Metadata = IndexUnpickler(io.BytesIO(content)).load()
        check_whole(index, manifest.files)
    except OSError as error:
        raise DamagedCheckpoint(f"{path} cannot be read: {error.strerror}") from None
    except (AttributeError, TypeError):  # perhaps of the classes of an index, but without values
        raise DamagedCheckpoint(f"{path} is not an index of tensors") from None
    except Exception as error:  # whatever damaged bytes make of the unpickler
        raise DamagedCheckpoint(f"{path} is damaged ({error})") from None
    return index


@contextlib.contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Let Python not look for garbage: among the million objects of an index it takes most time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def check_whole(index: dcp.Metadata, files: Mapping[str, File]) -> None:
    """Raise `ValueError` for a tensor that is there in part, or a file that is none of `files`.

    Raises `AttributeError` and `TypeError` if it is not an index.
    """
    for name, tensor in tensors_in(index).items():
        if sum(math.prod(chunk.sizes) for chunk in tensor.chunks) != math.prod(tensor.size):
            raise ValueError(f"{name} is in chunks that leave a gap or overlap")
    for file in {place.relative_path for place in index.storage_data.values()}:
        if file not in files:
            raise ValueError(f"it names {file!r}, which is no file of the manifest's")


def tensors_in(index: dcp.Metadata) -> dict[str, TensorStorageMetadata]:
    """Return the entries of an index by the tensors' names."""
    tensors = {}
    for name, tensor in index.state_dict_metadata.items():
        if not isinstance(tensor, TensorStorageMetadata):
            raise TypeError
        tensors[name] = tensor
    return tensors


def shapes_in(index: dcp.Metadata) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors in an index, by name."""
    return {name: tuple(tensor.size) for name, tensor in tensors_in(index).items()}


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
    except CheckpointException as error:  # not an Exception
        for exception, _ in error.failures.values():
            if isinstance(exception, UserError):
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
    """DCP's reader, given the index."""

    def __init__(self, folder: PurePath, index: dcp.Metadata) -> None:
        super().__init__(str(folder))
        self.folder, self.index, self.fs = folder, index, _CheckpointFiles(folder)

    def read_metadata(self, *args: Any, **kwargs: Any) -> dcp.Metadata:
        self.index.storage_meta = self.index.storage_meta or StorageMeta()
        self.index.storage_meta.load_id = self.load_id
        return self.index

    def _slice_file(self, file: Any, place: Any) -> IO[bytes]:  # private, torch 2.11 to 2.15
        if isinstance(self.folder, Path):
            return super()._slice_file(file, place)
        file.seek(place.offset)
        archive = io.BytesIO(file.read(place.length))
        # The network may alter what was verified before, and torch.load compares no checksums.
        with zipfile.ZipFile(archive) as files:
            if files.testzip() is not None:
                raise ValueError(f"bytes from {place.offset} on were altered")
        archive.seek(0)
        return archive


class _CheckpointFiles(FileSystem):
    """The files of a checkpoint, wherever it lies. What goes wrong while one is read names it."""

    def __init__(self, folder: PurePath) -> None:
        self.folder = folder

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Iterator[Any]:
        file = self.folder / PurePath(path).name
        try:
            with storage_of(file).open(file) as stream:
                yield stream
        except UserError:  # a store does not answer
            raise
        except OSError as error:
            raise DamagedCheckpoint(f"{file} cannot be read: {error.strerror}") from None
        except Exception as error:  # whatever damaged bytes make of torch.load
            what = str(error).partition("\n")[0]
            if isinstance(error, pickle.UnpicklingError):  # it advises to unpickle what there is
                what = "nothing but tensors is unpickled"
            raise DamagedCheckpoint(f"{file} has no tensor where one should be ({what})") from None


def member_of(kind: Any, name: Any) -> Enum:
    """Return a member of an enum: instead of the `getattr` that a pickle asks for.

    Python 3.11.0 to 3.11.3 (Debian 12 has 3.11.2) pickle members that way.
    """
    if not (isinstance(kind, type) and issubclass(kind, Enum) and name in kind.__members__):
        raise pickle.UnpicklingError("it asks for an attribute, which no index holds")
    return kind[name]


class IndexUnpickler(pickle.Unpickler):
    """Reads the index of a checkpoint and nothing else.

    Loading must not run code that a checkpoint brings. The class of pickled Python objects is left
    out as well: DCP would unpickle those without restriction.
    """

    ALLOWED = {
        "torch.distributed.checkpoint.metadata": {
            "Metadata",
            "MetadataIndex",
            "TensorStorageMetadata",
            "TensorProperties",
            "ChunkStorageMetadata",
            "StorageMeta",
            "_MEM_FORMAT_ENCODING",
        },
        "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
        "torch.serialization": {"_get_layout"},
        "collections": {"OrderedDict"},
        "pathlib": {"PosixPath", "WindowsPath"},
        "pathlib._local": {"PosixPath", "WindowsPath"},
        "torch": {
            "Size",
            "float64",
            "float32",
            "float16",
            "bfloat16",
            "uint8",
            "int64",
            "int32",
            "bool",
        },
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return member_of
        if name not in self.ALLOWED.get(module, ()):
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no index holds")
        return super().find_class(module, name)
