"""The tensors of a run: their names, which are the same on every layout, and reading them.

The saver writes them. Reading never runs code that a file brings.
"""

import hashlib
import io
import math
import pickle
import warnings
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import StorageMeta, TensorStorageMetadata

from torchmars.checkpoint.manifest import CheckpointManifest, DamagedCheckpoint
from torchmars.checkpoint.old_names import names_in_checkpoint
from torchmars.core.files import read_bytes
from torchmars.models import Model
from torchmars.optim import MARS
from torchmars.optim.rules.rule import SQUARED_NORM
from torchmars.optim.tensors import unwrapped
from torchmars.parallel.layout import Layout
from torchmars.parallel.model import ParallelModel


def training_state(
    layout: Layout,
    weights: Mapping[str, Tensor],
    optimizer: MARS,
    average: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """Return the tensors of a run that this rank has a part of, by name.

    They are weights, their moving average if there is one, optimizer state and this rank's RNG
    state.

    A flat dict can be read on another layout. Hyperparameters are not in it: they are the config's.
    """
    return (
        model_state(weights)
        | average_state(average)
        | optimizer_state(optimizer)
        | {"skipped_steps": optimizer.skipped}
        | rng_state(layout.world.rank)
    )


def model_state(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return weights by their names in a checkpoint."""
    return {f"model.{name}": unwrapped(value) for name, value in weights.items()}


def average_state(average: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the moving average of weights by its names in a checkpoint."""
    return {f"ema.{name}": value for name, value in average.items()}


def optimizer_state(optimizer: MARS) -> dict[str, Tensor]:
    """Return the optimizer's state tensors by parameter and name."""
    return {
        f"optimizer.{name}.{key}": value
        for name, parameter in named_parameters(optimizer).items()
        for key, value in optimizer.state[parameter].items()
    }


def optimizer_state_names(optimizer: MARS) -> dict[str, str]:
    """Return for each parameter, by name, its rule and the names of its state tensors."""
    return {
        name: " ".join([group["rule"], *sorted(optimizer.state[parameter])])
        for group in optimizer.param_groups
        for name, parameter in zip(group["param_names"], group["params"])
    }


def named_parameters(optimizer: MARS) -> dict[str, Tensor]:
    """Return the optimizer's parameters by name."""
    return {
        name: parameter
        for group in optimizer.param_groups
        for name, parameter in zip(group["param_names"], group["params"])
    }


def rng_state(rank: int) -> dict[str, Tensor]:
    """Return the state of this process's default generators as bytes.

    They are those of the CPU and, if there is one, of the GPU.
    """
    gpu = {f"rng.cuda.{rank}": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {}
    return {f"rng.cpu.{rank}": torch.get_rng_state()} | gpu


def set_rng_state(state: dict[str, Tensor]) -> None:
    """Restore the states that `rng_state` returned, or some of them."""
    for name, value in state.items():
        (torch.cuda if ".cuda." in name else torch).set_rng_state(value)


def seed_rng(*what: int) -> None:
    """Seed the default generators by some numbers, such as seed, step and rank."""
    torch.manual_seed(
        int.from_bytes(hashlib.sha256(repr(what).encode()).digest()[:8], "big", signed=True)
    )


def load(
    folder: Path,
    manifest: CheckpointManifest,
    layout: Layout,
    model: ParallelModel,
    optimizer: MARS,
    average: Mapping[str, Tensor],
) -> bool:
    """Load the checkpoint `folder` into `model`, `optimizer` and `average` in place.

    Called by every rank, on any layout. The random number generators continue where the number of
    ranks is still the same, and are seeded anew otherwise. Returns whether the checkpoint has an
    average; `average` is left as it is if not. Raises `DamagedCheckpoint` on every rank. Weights
    and state are then of no use until another load.
    """
    state = training_state(layout, model.weights, optimizer, average)
    random = {name: state.pop(name) for name in list(state) if name.startswith("rng.")}
    # Not left to DCP: its own error is a page of tracebacks.
    saved = set(layout.on_first(lambda: read_index(folder)).state_dict_metadata)
    if manifest.world_size == layout.world.size:
        random = {name: value for name, value in random.items() if name in saved}
    else:
        random = {}
    has_average = any(name.startswith("ema.") for name in saved)
    if not has_average:
        state = {name: value for name, value in state.items() if not name.startswith("ema.")}
    read_state(folder, manifest, model.whole, state | random, saved, layout.control)
    model.follow_weights()
    seed_rng(manifest.config["run"]["seed"], manifest.step, layout.world.rank)
    set_rng_state(random)
    return has_average


def read_state(
    folder: Path,
    manifest: CheckpointManifest,
    model: Model,
    state: dict[str, Tensor],
    saved: Collection[str],
    group: dist.ProcessGroup | None,
) -> None:
    """Fill `state` as `read_tensors` does, also where the checkpoint is of an earlier release.

    `saved` are the names in the checkpoint. `model` is the whole one that `state` is a part of.
    """
    unknown = {name for name in state if name.endswith(f".{SQUARED_NORM}") and name not in saved}
    for name in unknown:
        state[name].fill_(math.nan)
    state = {name: value for name, value in state.items() if name not in unknown}
    former = names_in_checkpoint(manifest.optimizer, manifest.config, model, state, saved)
    by_name = {former.get(name, (name,))[0]: value for name, value in state.items()}
    read_tensors(folder, by_name, group)
    for name, (_, factor) in former.items():
        state[name].mul_(factor)


def read_tensors(
    folder: Path,
    state: dict[str, Tensor],
    group: dist.ProcessGroup | None,
    index: dcp.Metadata | None = None,
) -> None:
    """Fill `state` in place from the checkpoint `folder`.

    Called by all ranks of `group`, or for None by this process alone. `index` is the checkpoint's,
    where it was read before: that of many ranks takes seconds. Raises `DamagedCheckpoint`,
    on every rank, where a tensor is missing, of another shape or cannot be read.
    """
    try:
        with warnings.catch_warnings():
            # It warns of a single process, which is on purpose.
            warnings.filterwarnings("ignore", message="torch.distributed is")
            dcp.load(
                state,
                storage_reader=_TensorReader(folder, index),
                process_group=group,
                no_dist=group is None,
            )
    except CheckpointException as error:
        raise DamagedCheckpoint(f"{folder} cannot be read: {reason(error)}") from None


def reason(error: CheckpointException) -> str:
    """Return the first error in one line: that of the disk, if there is one."""
    exceptions = [exception for exception, _ in error.failures.values()]
    for exception in exceptions:
        if isinstance(exception, OSError) and exception.strerror:
            return exception.strerror
    return f"{type(exceptions[0]).__name__}: {exceptions[0]}"


class _IndexUnpickler(pickle.Unpickler):
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
        if name not in self.ALLOWED.get(module, ()):
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no index holds")
        return super().find_class(module, name)


def read_index(folder: Path) -> dcp.Metadata:
    """Return DCP's index of the tensors in `folder`.

    Raises `DamagedCheckpoint` if it is missing or not an index.
    """
    path = folder / ".metadata"
    try:
        index = _IndexUnpickler(io.BytesIO(read_bytes(path))).load()
    except OSError as error:
        raise DamagedCheckpoint(f"{path} cannot be read: {error.strerror}") from None
    except Exception as error:  # whatever damaged bytes make of the unpickler
        raise DamagedCheckpoint(f"{path} is damaged ({error})") from None
    if not isinstance(index, dcp.Metadata):
        raise DamagedCheckpoint(f"{path} is not an index of tensors")
    return index


def saved_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors in the checkpoint `folder`, by name.

    Raises `DamagedCheckpoint`.
    """
    return shapes_in(read_index(folder), folder)


def shapes_in(index: dcp.Metadata, folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors in the index of the checkpoint `folder`, by name.

    Raises `DamagedCheckpoint`.
    """
    shapes = {}
    try:
        for name, tensor in index.state_dict_metadata.items():
            if not isinstance(tensor, TensorStorageMetadata):
                raise TypeError
            shapes[name] = tuple(tensor.size)
    except (AttributeError, TypeError):
        raise DamagedCheckpoint(f"{folder / '.metadata'} is not an index of tensors") from None
    return shapes


class _TensorReader(dcp.FileSystemReader):
    """DCP's reader with its unrestricted unpickling of the index replaced (torch 2.11 to 2.13)."""

    def __init__(self, folder: Path, index: dcp.Metadata | None) -> None:
        super().__init__(folder)
        self.index = index

    def read_metadata(self, *args: Any, **kwargs: Any) -> dcp.Metadata:
        metadata = self.index or read_index(Path(self.path))
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata
