"""The index of a checkpoint: its tensors, the chunks of each, and where every chunk lies.

Reading it never runs code that a file brings. Its SHA-256 is in the manifest. So its numbers are
those of the save, and are not checked again, but that no part of a tensor is missing.
"""

import contextlib
import gc
import hashlib
import io
import math
import pickle
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import PurePath
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from torchmars.checkpoint.manifest import CheckpointManifest, DamagedCheckpoint
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
