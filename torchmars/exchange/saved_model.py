"""A model of a checkpoint for use without training, that is without an optimizer."""

import contextlib
import os
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePath
from typing import Literal

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from torchmars.checkpoint.folder import (
    checkpoints,
    folder_of,
    no_checkpoint,
    step_folder,
    step_of,
)
from torchmars.checkpoint.manifest import CheckpointManifest, DamagedCheckpoint
from torchmars.checkpoint.reader import read_index, read_tensors, shapes_in
from torchmars.checkpoint.resume import find_checkpoint
from torchmars.checkpoint.state_dict import average_state, model_state
from torchmars.config import ActivationCheckpointConfig, ParallelismConfig, ResolvedConfig
from torchmars.config.float8 import Float8Config
from torchmars.config.load import config_from_tables
from torchmars.config.run import RunConfig
from torchmars.core.console import say
from torchmars.core.errors import UserError
from torchmars.data.tokenizer import Tokenizer, load_tokenizer
from torchmars.exchange.folder import (
    TOKENIZER,
    FolderModel,
    is_folder_of_transformers,
    open_folder,
)
from torchmars.exchange.folder_tokenizer import FolderTokenizer
from torchmars.exchange.weight_files import load_weights, shape_problem
from torchmars.models import Model, build_run_model
from torchmars.models.documents import document_starts
from torchmars.parallel.layout import Layout
from torchmars.parallel.parallel_model import ParallelModel
from torchmars.storage.storage import MANIFEST

ComputeDtype = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class SavedModel:
    """The model of a checkpoint, whose weights are still on the disk."""

    folder: PurePath
    manifest: CheckpointManifest
    config: ResolvedConfig
    model: Model
    """Without memory."""
    index: dcp.Metadata
    """Where its tensors lie."""
    average: bool = False
    """Whether its weights are the moving average of the run's."""

    @property
    def step(self) -> int:
        """Optimizer steps that were made."""
        return self.manifest.step

    def read(self, name: str) -> Tensor:
        """Return a weight. Raises `DamagedCheckpoint`."""
        module, _, last = name.rpartition(".")
        owner = self.model.get_submodule(module)
        value = torch.empty(getattr(owner, last).shape)
        is_buffer = last in dict(owner.named_buffers(recurse=False))  # no average is made of these
        state = average_state if self.average and not is_buffer else model_state
        read_tensors(self.folder, state({name: value}), self.index)
        return value


def open_model(folder: PurePath, step: int | None = None, average: bool = False) -> SavedModel:
    """Open the model of a checkpoint, or of a run: its newest good one, or the one of `step`.

    With `average`, its weights are the moving average of the run's. Raises `UserError` if there is
    none, and `DamagedCheckpoint`.
    """
    if step is not None:
        folder = checkpoint_of(folder, step)
    folder, manifest = find_checkpoint(folder, warn=lambda text: say(text, error=True))
    config = config_from_tables(manifest.config, f"in {folder}/{MANIFEST}")
    index = read_index(folder, manifest)
    saved = shapes_in(index)
    model = build_run_model(config, manifest.vocab_size).eval()
    if wrong := shape_problem(saved, model_state(model.state_dict())):
        raise DamagedCheckpoint(
            f"{folder} does not have the model that its {MANIFEST} describes: it {wrong}"
        )
    if average and not any(name.startswith("ema.") for name in saved):
        raise UserError(
            f"{folder} has no moving average of its weights: the run had no training.ema_decay"
        )
    return SavedModel(folder, manifest, config, model, index, average)


def open_last(
    folder: PurePath, step: int | None, count: int, average: bool = False
) -> list[SavedModel]:
    """Open the models of the last `count` checkpoints of a run, up to `step`, newest first.

    `average` is as in `open_model`. Raises `UserError` if there are fewer, and `DamagedCheckpoint`.
    """
    newest = open_model(folder, step, average)
    if count == 1:
        return [newest]
    found = [path for path in checkpoints(folder_of(folder)) if step_of(path) <= newest.step]
    if len(found) < count:
        raise UserError(
            f"{folder} has {len(found)} checkpoints up to step {newest.step}: lower --average"
        )
    earlier = reversed(found[-count:-1])
    return [newest, *(open_model(path, average=average) for path in earlier)]


def checkpoint_of(run: PurePath, step: int) -> PurePath:
    """Return the checkpoint of a run's `step`. Raises `UserError` if there is none."""
    folder = folder_of(run)
    steps = [step_of(path) for path in checkpoints(folder)]
    if not steps:
        raise no_checkpoint(run)
    if step not in steps:
        there_are = ", ".join(map(str, steps))
        raise UserError(f"{run} has no checkpoint of step {step}: there are {there_are}")
    return step_folder(folder, step)


def load_model(
    folder: PurePath, step: int | None = None
) -> tuple[Model, Tokenizer, ResolvedConfig]:
    """Load a model on the CPU. Return it, its tokenizer and its config.

    `folder` and `step` are as in `open_any`. Raises `UserError` and `DamagedCheckpoint`.
    """
    found = open_any(folder, step)
    model = found.model.to_empty(device="cpu")
    if isinstance(found, FolderModel):
        load_weights(found.weights, model.state_dict())
    else:
        read_tensors(found.folder, model_state(model.state_dict()), found.index)
    return model, tokenizer_in(found), found.config


def load_sharded_model(
    folder: PurePath, layout: Layout, dtype: ComputeDtype, step: int | None = None
) -> tuple[ParallelModel, Tokenizer]:
    """Load a model onto ranks that share its weights by FSDP. Return it and its tokenizer.

    `folder` and `step` are as in `open_any`. Called by every rank; each reads its own part only.
    `dtype` is the model's dtype of compute. Raises `UserError` and `DamagedCheckpoint`, on every
    rank.
    """
    found = layout.on_first(lambda: without_index(open_any(folder, step)))
    config = found.config
    tokenizer = tokenizer_in(found)
    find_starts = partial(
        document_starts,
        end_of_text=tokenizer.end_of_text,
        begin_token=tokenizer.begin_token,
    )
    model = ParallelModel(
        found.model,
        ParallelismConfig(),
        replace(config.training, dtype=dtype, compile=False, float8=Float8Config()),
        ActivationCheckpointConfig(),
        layout,
        layout.device,
        find_starts=find_starts if config.data.separate_documents else None,
    )
    if isinstance(found, FolderModel):
        layout.on_all(lambda: load_weights(found.weights, model.tensors))
    else:
        state = model_state(model.tensors)
        index = layout.on_all(lambda: read_index(found.folder, found.manifest))
        layout.on_all(lambda: read_tensors(found.folder, state, index))
    model.follow_weights()
    return model, tokenizer


def without_index(found: SavedModel | FolderModel) -> SavedModel | FolderModel:
    """Return a model for other ranks, to which an index of many ranks is too large to be sent."""
    return found if isinstance(found, FolderModel) else replace(found, index=dcp.Metadata({}))


def tokenizer_in(found: SavedModel | FolderModel) -> Tokenizer:
    """Return the tokenizer of a model that was found. Raises `UserError`."""
    if isinstance(found, FolderModel):
        return FolderTokenizer(found.config.data.tokenizer)
    return tokenizer_of(found)


def tokenizer_of(found: SavedModel) -> Tokenizer:
    """Return the tokenizer of a run's model: from its folder, or else from its config.

    Raises `UserError` if neither is the one that it was trained with.
    """
    name, begin_token = found.config.data.tokenizer, found.config.data.begin_token
    if found.manifest.tokenizer_sha256 is None:
        return load_tokenizer(name, begin_token)
    run = Path(os.path.realpath(found.folder)).parent.parent
    copy = RunConfig(run.name, str(run.parent)).tokenizer
    for file in (str(copy), name):
        with contextlib.suppress(UserError):  # it is not there
            tokenizer = load_tokenizer(file, begin_token)
            if tokenizer.sha256 == found.manifest.tokenizer_sha256:
                return tokenizer
    raise UserError(
        f"neither {copy} nor {name} is the tokenizer that {found.folder} was trained with: put "
        "its tokenizer.json, and the tokenizer_config.json beside it, back into one of them"
    )


def open_any(folder: PurePath, step: int | None = None) -> SavedModel | FolderModel:
    """Open a model: of a checkpoint or a run, as `open_model` does, or of transformers.

    A folder of transformers needs a tokenizer.json. Raises `UserError` and `DamagedCheckpoint`.
    """
    if isinstance(folder, Path) and folder.is_file():
        raise UserError(f"{folder} is a file: name a run, a checkpoint or a folder of transformers")
    if not is_folder_of_transformers(folder):
        return open_model(folder, step)
    found = open_folder(folder)
    if "data" not in found.tables:
        raise UserError(f"{folder} has no {TOKENIZER}: put the model's file there")
    return found
