"""The index of a checkpoint: its tensors, the chunks of each, and where every chunk lies.

Reading it never runs code that a file brings. What it says is checked here, so that whoever reads
tensors by it reads each element once, and no file but the checkpoint's.
"""

import contextlib
import gc
import hashlib
import io
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from torchmars.checkpoint.manifest import CheckpointManifest, DamagedCheckpoint
from torchmars.checkpoint.unpickler import IndexUnpickler
from torchmars.storage import storage_of
from torchmars.storage.storage import File

INDEX = ".metadata"
MOST_DIMS = 8  # the corners of a chunk are 2 to this power


def read_index(folder: PurePath, manifest: CheckpointManifest) -> dcp.Metadata:
    """Return DCP's index of the tensors in the checkpoint `folder`, whose `manifest` is given.

    Raises `DamagedCheckpoint` if it is missing, not an index, or not one of whole tensors in the
    files of the manifest.
    """
    path = folder / INDEX
    try:
        with storage_of(path).open(path) as stream:
            content = stream.read()
        if hashlib.sha256(content).hexdigest() != manifest.files[INDEX].sha256:
            raise ValueError("its SHA-256 is not the manifest's")
        with without_garbage_collection():
            index: dcp.Metadata = IndexUnpickler(io.BytesIO(content)).load()
        wrong = index_problem(index, manifest.files)
    except OSError as error:
        raise DamagedCheckpoint(f"{path} cannot be read: {error.strerror}") from None
    except (AttributeError, TypeError):  # perhaps of the classes of an index, but without values
        raise DamagedCheckpoint(f"{path} is not an index of tensors") from None
    except Exception as error:  # whatever damaged bytes make of the unpickler
        raise DamagedCheckpoint(f"{path} is damaged ({error})") from None
    if wrong:
        raise DamagedCheckpoint(f"{path} is damaged ({wrong})")
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


def index_problem(index: dcp.Metadata, files: Mapping[str, File]) -> str:
    """Return why tensors cannot be read by `index` from the checkpoint's `files`; "" if they can.

    Raises `AttributeError` and `TypeError` if it is not an index.
    """
    for name, tensor in tensors_in(index).items():
        if wrong := tensor_problem(tensor):
            return f"{name} is {wrong}"
    return places_problem(index, files)


def tensor_problem(tensor: TensorStorageMetadata) -> str:
    """Return the fault of a tensor's entry in an index; "" if there is none.

    Raises `AttributeError` and `TypeError` if it is not an entry.
    """
    shapes = [tensor.size]
    for chunk in tensor.chunks:
        shapes += [chunk.offsets, chunk.sizes]
    if not all(type(shape) is torch.Size for shape in shapes):
        raise TypeError
    if not isinstance(tensor.properties.dtype, torch.dtype):
        raise TypeError
    if any(len(shape) != len(tensor.size) for shape in shapes):
        return f"in {len(tensor.size)} dims, and chunks in others"
    if len(tensor.size) > MOST_DIMS:
        return f"in {len(tensor.size)} dims"
    if min(itertools.chain(*shapes), default=0) < 0:
        return "with a negative size"
    boxes = [(chunk.offsets, chunk.sizes) for chunk in tensor.chunks if math.prod(chunk.sizes)]
    return "" if tile(tensor.size, boxes) else "in chunks that leave a gap, overlap or go beyond it"


def tile(size: Sequence[int], boxes: Sequence[tuple[Sequence[int], Sequence[int]]]) -> bool:
    """Return whether every element of a tensor is in one of `boxes`, and nothing else is.

    A box has the index of its first element, and a size that is not 0.
    """
    if not math.prod(size):
        return not boxes
    # Of dims that are not divided every box has the whole.
    divided = [
        dim
        for dim, whole in enumerate(size)
        if any(begin[dim] or length[dim] != whole for begin, length in boxes)
    ]
    # In how many boxes an element is changes at their corners alone. So where all changes are those
    # at the corners of the whole tensor, every element is in as many boxes as in that tensor.
    changes: Counter[tuple[int, ...]] = Counter()
    for count, begin, length in [(-1, [0] * len(size), size), *((1, *box) for box in boxes)]:
        ends = [((begin[dim], 1), (begin[dim] + length[dim], -1)) for dim in divided]
        for corner in itertools.product(*ends):
            changes[tuple(place for place, _ in corner)] += count * math.prod(
                sign for _, sign in corner
            )
    return not any(changes.values())


def places_problem(index: dcp.Metadata, files: Mapping[str, File]) -> str:
    """Return which chunk cannot lie where `index` says; "" if all can.

    Each has a part of one of the checkpoint's `files` to itself. Raises `AttributeError` and
    `TypeError` for what is no place.
    """
    wanted = {
        MetadataIndex(name, chunk.offsets): size * tensor.properties.dtype.itemsize
        for name, tensor in tensors_in(index).items()
        for chunk in tensor.chunks
        if (size := math.prod(chunk.sizes))
    }
    intervals = defaultdict(list)
    for key, size in wanted.items():
        place = index.storage_data.get(key)
        if place is None:
            return f"it does not say where {key.fqn} lies"
        if not isinstance(place, _StorageInfo) or place.transform_descriptors:
            raise TypeError
        if place.relative_path == INDEX or place.relative_path not in files:
            return f"{key.fqn} lies in {place.relative_path!r}, which is no file of the manifest's"
        if place.length < size:
            return f"{key.fqn} needs {size} bytes, and has {place.length}"
        intervals[place.relative_path].append((place.offset, place.offset + place.length))
    for file, parts in intervals.items():
        parts.sort()
        ends = [0, *(end for _, end in parts)]
        begins = [*(begin for begin, _ in parts), files[file].size]
        if any(end > begin for end, begin in zip(ends, begins)):
            return f"tensors overlap in {file}, or lie beyond its end"
    return ""
