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
            "optimizer.mode", "optimizer.last_grad_dtype")


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
    optimizer: dict[str, str]
    """The rule and the state tensors of each parameter."""
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


def optimizer_state_names(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """For each parameter by name, its rule and the names of its state tensors."""
    return {name: " ".join([group["rule"], *sorted(optimizer.state[parameter])])
            for group in optimizer.param_groups for name, parameter in zip(group["param_names"], group["params"])}


def check_resume(config: Config, data: str, optimizer: torch.optim.Optimizer) -> tuple[Path, Meta] | None:
    """The newest checkpoint and its meta data, or None; `UserError` where it belongs to another run than `config`'s on `data`.

    `optimizer` is the one the run would go on with; its parameters may be on the meta device.
    """
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
    for name, now in optimizer_state_names(optimizer).items():
        was = meta.optimizer.get(name)
        if was != now:
            raise UserError(f"{folder} has for {name} the rule and state ({was}), the config's optimizer ({now}): "
                            "set optimizer.clip, the roles' and groups' rules back, or choose another run.name")
    return folder, meta


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
        write_durably(partial / "meta.json", json.dumps(asdict(meta), indent=1) + "\n")
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
        sync_folder(folder.parent)

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
    saved = layout.agree(lambda: set(read_index(folder).state_dict_metadata))[0]  # DCP's own error is a page of tracebacks
    state = training_state(layout, model, optimizer)
    if meta.world_size != layout.size:
        saved = {name for name in saved if not name.startswith("rng.")}
    state = {name: value for name, value in state.items() if name in saved or not name.startswith("rng.")}
    try:
        dcp.load(state, storage_reader=_TensorReader(folder), process_group=layout.control)
    except CheckpointException as error:
        raise UserError(f"cannot read the checkpoint {folder}: {_reason(error)}: {REMEDY}") from None
    set_rng_state({name: value for name, value in state.items() if name.startswith("rng.")})


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
    return state | rng_state(layout.rank)


def rng_state(rank: int) -> dict[str, Tensor]:
    """The state of this process's default generators, of the CPU and of the GPU if there is one, as bytes."""
    gpu = {f"rng.cuda.{rank}": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {}
    return {f"rng.cpu.{rank}": torch.get_rng_state()} | gpu


def set_rng_state(state: dict[str, Tensor]) -> None:
    """Restore what there is of what `rng_state` returned."""
    for name, value in state.items():
        (torch.cuda if ".cuda." in name else torch).set_rng_state(value)


def write_durably(path: Path, text: str) -> None:
    """Write a small file so that a crash leaves the old one or the new one, whole."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("w") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    partial.rename(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


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
