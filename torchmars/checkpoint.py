"""Checkpoints: save, find, check, load. `torch.distributed.checkpoint` underneath.

A checkpoint is a folder `step-00000100` in the run's `checkpoints`: the tensors of every rank, and `meta.json`. It is
written under another name and renamed once every rank has finished, so a folder of that name is complete.
"""

import json
import os
import pickle
import shutil
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import StorageMeta

from torchmars.config import Config
from torchmars.errors import UserError
from torchmars.parallel.mesh import Layout

FORMAT = "torchmars-checkpoint-1"
REMEDY = "move it away to go on from an older one"
# What makes a run the same run: a checkpoint made with other values is another run's.
IDENTITY = ("run.seed", "model.name", "model.size", "model.n_layer", "model.n_head", "model.n_embd", "model.vocab_size",
            "model.scale_attn_by_inverse_layer_idx", "data.tokenizer", "training.seq_len", "optimizer.name",
            "optimizer.optimize_1d", "optimizer.mode", "optimizer.last_grad_dtype")


@dataclass
class Meta:
    """What is known of a checkpoint without its tensors."""

    step: int
    """Optimizer steps made."""
    position: int
    """Samples of the global data order consumed."""
    world_size: int
    data: str
    """Fingerprint of the training tokens."""
    vocab_size: int
    """The tokenizer's vocabulary, without padding."""
    config: dict[str, Any]
    """The resolved config, a table per section."""
    format: str = FORMAT


def run_folder(config: Config) -> Path:
    """The folder of the run that `config` describes."""
    return Path(config.run.folder) / config.run.name


def complete(folder: Path) -> list[Path]:
    """The complete checkpoints in a run's `checkpoints` folder, oldest first."""
    return sorted(path for path in folder.glob("step-*") if path.suffix != ".partial" and (path / "meta.json").exists())


def latest(config: Config) -> Path | None:
    """The newest complete checkpoint of the run, or None."""
    found = complete(run_folder(config) / "checkpoints")
    return found[-1] if found else None


def read_meta(folder: Path) -> Meta:
    """The meta data of the checkpoint `folder`. Raises `UserError` where there is none that this version wrote."""
    try:
        raw = json.loads((folder / "meta.json").read_text())
        if raw["format"] != FORMAT:
            raise ValueError(f"format {raw['format']!r}")
        return Meta(**raw)
    except OSError as error:
        raise UserError(f"{folder} is no checkpoint: cannot read its meta.json ({error.strerror})") from None
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{folder}/meta.json is not of this version ({error}): move the checkpoint away") from None


def check_resume(config: Config, data: str) -> Meta | None:
    """The newest checkpoint's meta data, or None; `UserError` where it belongs to another run than `config`'s on `data`."""
    folder = latest(config)
    if folder is None:
        return None
    meta = read_meta(folder)
    now = asdict(config)
    for name in IDENTITY:
        section, key = name.split(".")
        was = meta.config.get(section, {}).get(key)
        if was != now[section][key]:
            raise UserError(f"{folder} was made with {name} = {was}, the config says {now[section][key]}: "
                            f"set it back, or choose another run.name")
    if meta.data != data:
        raise UserError(f"{folder} was trained on other tokens than those in {config.data.path}: "
                        f"restore the shards or choose another run.name")
    return meta


def save(config: Config, layout: Layout, model: nn.Module, optimizer: torch.optim.Optimizer, meta: Meta) -> Path:
    """Write the checkpoint of step `meta.step` and return its folder. Called by every rank."""
    folder = run_folder(config) / "checkpoints" / f"step-{meta.step:08d}"
    partial = folder.with_name(folder.name + ".partial")

    def begin() -> None:
        shutil.rmtree(partial, ignore_errors=True)
        try:
            partial.mkdir(parents=True)
        except OSError as error:
            raise UserError(f"cannot write the checkpoint {partial}: {error.strerror}: check run.folder") from None

    def finish() -> None:
        (partial / "meta.json").write_text(json.dumps(asdict(meta), indent=1) + "\n")
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
        descriptor = os.open(folder.parent, os.O_RDONLY)  # makes the rename itself durable
        os.fsync(descriptor)
        os.close(descriptor)

    layout.on_first(begin)
    try:
        dcp.save(training_state(layout, model, optimizer), storage_writer=dcp.FileSystemWriter(partial),
                 process_group=layout.control)
    except CheckpointException as error:
        raise UserError(f"cannot write the checkpoint {partial}: {_reason(error)}") from None
    layout.on_first(finish)
    return folder


def load(folder: Path, meta: Meta, layout: Layout, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Load the checkpoint `folder` into `model` and `optimizer` in place, from any layout. Called by every rank.

    The random number generators are restored where the number of ranks is still the same.
    """
    state = training_state(layout, model, optimizer)
    if meta.world_size != layout.size:
        state = {name: value for name, value in state.items() if not name.startswith("rng.")}
    layout.on_first(lambda: read_index(folder))  # DCP's own error for a bad index is a page of tracebacks
    try:
        dcp.load(state, storage_reader=_TensorReader(folder), process_group=layout.control)
    except CheckpointException as error:
        raise UserError(f"cannot read the checkpoint {folder}: {_reason(error)}: {REMEDY}") from None
    if meta.world_size == layout.size:
        set_rng_state(state[f"rng.{layout.rank}"])


def load_model(folder: Path, model: nn.Module) -> None:
    """Load the weights of the checkpoint `folder` into a model on this one process."""
    read_index(folder)
    try:
        with warnings.catch_warnings():  # that this is a single process is on purpose
            warnings.filterwarnings("ignore", message="torch.distributed is")
            dcp.load({f"model.{name}": value for name, value in model.state_dict().items()},
                     storage_reader=_TensorReader(folder), no_dist=True)
    except CheckpointException as error:
        raise UserError(f"cannot read the checkpoint {folder}: {_reason(error)}: {REMEDY}") from None


def training_state(layout: Layout, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Every tensor of a run, flat and by name, so that it can be laid out anew: weights, optimizer state, this rank's RNG.

    Hyperparameters are not among them: they are the config's.
    """
    state = {f"model.{name}": value for name, value in model.state_dict().items()}
    for group in optimizer.param_groups:
        for name, parameter in zip(group["param_names"], group["params"]):
            state |= {f"optimizer.{name}.{key}": value for key, value in optimizer.state[parameter].items()}
    return state | {f"rng.{layout.rank}": rng_state()}


def rng_state() -> Tensor:
    """The state of this process's default generators, CPU then GPU (if any), as bytes."""
    states = [torch.get_rng_state()] + ([torch.cuda.get_rng_state()] if torch.cuda.is_available() else [])
    return torch.cat(states)


def set_rng_state(state: Tensor) -> None:
    """Restore what `rng_state` returned."""
    cpu = torch.get_rng_state().numel()
    torch.set_rng_state(state[:cpu])
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(state[cpu:])


def _reason(error: CheckpointException) -> str:
    exception, _ = next(iter(error.failures.values()))
    return f"{type(exception).__name__}: {exception}"


class _IndexUnpickler(pickle.Unpickler):
    """Reads the index of a checkpoint and nothing else: loading must not run code that a checkpoint brings.

    The class of pickled Python objects is left out as well: DCP would unpickle those without restriction.
    """

    ALLOWED = {
        "torch.distributed.checkpoint.metadata": {"Metadata", "MetadataIndex", "TensorStorageMetadata", "TensorProperties",
                                                  "ChunkStorageMetadata", "StorageMeta", "_MEM_FORMAT_ENCODING"},
        "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
        "torch.serialization": {"_get_layout"},
        "collections": {"OrderedDict"},
        "pathlib": {"PosixPath", "WindowsPath"},
        "pathlib._local": {"PosixPath", "WindowsPath"},
        "torch": {"Size", "float64", "float32", "float16", "bfloat16", "uint8", "int64", "int32", "bool"},
    }

    def find_class(self, module: str, name: str) -> Any:
        if name not in self.ALLOWED.get(module, ()):
            raise pickle.UnpicklingError(f"its index asks for {module}.{name}, which no index holds")
        return super().find_class(module, name)


def read_index(folder: Path) -> dcp.Metadata:
    """DCP's index of the tensors in `folder`. Raises `UserError` where it is missing or not an index."""
    try:
        with (folder / ".metadata").open("rb") as stream:
            return _IndexUnpickler(stream).load()
    except OSError as error:
        raise UserError(f"cannot read the checkpoint {folder}: its index .metadata: {error.strerror}: {REMEDY}") from None
    except Exception as error:  # whatever damaged bytes make of the unpickler
        raise UserError(f"cannot read the checkpoint {folder}: its index .metadata is damaged ({error}): {REMEDY}") from None


class _TensorReader(dcp.FileSystemReader):
    """DCP's reader with its unrestricted unpickling of the index replaced (torch 2.11 to 2.13)."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> dcp.Metadata:
        metadata = read_index(Path(self.path))
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata
