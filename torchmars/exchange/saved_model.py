"""A model that is saved: to use it without an optimizer, and to start a new run from its weights.

It is that of a checkpoint, of a folder of transformers, or bare weights.
"""

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path, PurePath
from typing import Any, Literal

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from torchmars.checkpoint import folder as folders
from torchmars.checkpoint import state_dict
from torchmars.checkpoint.manifest import CheckpointManifest, DamagedCheckpoint
from torchmars.checkpoint.reader import read_index, read_tensors, shapes_in
from torchmars.checkpoint.resume import find_checkpoint
from torchmars.config import ActivationCheckpointConfig, ParallelismConfig, ResolvedConfig
from torchmars.config.load import config_from_tables
from torchmars.config.model_args import Multipliers
from torchmars.config.sections import HF, RunConfig
from torchmars.config.training import Float8Config
from torchmars.core.console import say
from torchmars.core.errors import UserError
from torchmars.core.places import place
from torchmars.core.words import counted
from torchmars.data.tokenizer import Tokenizer, load_tokenizer
from torchmars.exchange import weights as files
from torchmars.exchange.folder import (
    FolderModel,
    find_folder,
    is_folder_of_transformers,
    open_folder,
    other_tokenizer,
)
from torchmars.models import Model, build_run_model
from torchmars.models.documents import document_starts
from torchmars.optim import MARS
from torchmars.optim.rules import state_fits
from torchmars.parallel.layout import Layout
from torchmars.parallel.parallel_model import ParallelModel
from torchmars.storage.storage import MANIFEST

ComputeDtype = Literal["float32", "bfloat16"]
Level = Literal["full", "size"]


@dataclass(frozen=True)
class SavedModel:
    """The model of a checkpoint, whose weights are still on the disk."""

    folder: PurePath
    manifest: CheckpointManifest
    config: ResolvedConfig
    model: Model
    """Without memory."""
    average: bool = False
    """Whether its weights are the moving average of the run's."""

    @property
    def step(self) -> int:
        """Optimizer steps that were made."""
        return self.manifest.step

    @cached_property
    def index(self) -> dcp.Metadata:
        """Where its tensors lie."""
        return read_index(self.folder, self.manifest)

    def __getstate__(self) -> dict[str, Any]:
        """An index of many ranks is too large to be sent: other ranks read it."""
        return {name: value for name, value in vars(self).items() if name != "index"}

    def read(self, name: str) -> Tensor:
        """Return a weight. Raises `DamagedCheckpoint`."""
        module, _, last = name.rpartition(".")
        owner = self.model.get_submodule(module)
        value = torch.empty(getattr(owner, last).shape)
        is_buffer = last in dict(owner.named_buffers(recurse=False))  # no average is made of these
        averaged = self.average and not is_buffer
        state = state_dict.average_state if averaged else state_dict.model_state
        read_tensors(self.folder, state({name: value}), self.index)
        return value

    def fill(self, weights: Mapping[str, Tensor]) -> None:
        """Fill `weights`, sharded or not, by name. Raises `DamagedCheckpoint`."""
        read_tensors(self.folder, state_dict.model_state(weights), self.index)

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the run: from its folder, or else from its config.

        Raises `UserError` if neither is the one that it was trained with.
        """
        name, begin_token = self.config.data.tokenizer, self.config.data.begin_token
        if self.manifest.tokenizer_sha256 is None:
            return load_tokenizer(name, begin_token)
        run = Path(os.path.realpath(self.folder)).parent.parent
        copy = RunConfig(run.name, str(run.parent)).tokenizer
        for file in (str(copy), name):
            with contextlib.suppress(UserError):  # it is not there
                tokenizer = load_tokenizer(file, begin_token)
                if tokenizer.sha256 == self.manifest.tokenizer_sha256:
                    return tokenizer
        raise UserError(
            f"neither {copy} nor {name} is the tokenizer that {self.folder} was trained with: put "
            "its tokenizer.json, and the tokenizer_config.json beside it, back into one of them"
        )


def open_model(
    folder: PurePath, step: int | None = None, average: bool = False, level: Level = "full"
) -> SavedModel:
    """Open the model of a checkpoint, or of a run: its newest good one, or the one of `step`.

    With `average`, its weights are the moving average of the run's. `level` says how files are
    checked. Raises `UserError` if there is none, and `DamagedCheckpoint`.
    """
    if step is not None:
        folder = checkpoint_of(folder, step)
    folder, manifest = find_checkpoint(folder, lambda text: say(text, error=True), level)
    config = config_from_tables(manifest.config, f"in {folder}/{MANIFEST}")
    model = build_run_model(config, manifest.vocab_size).eval()
    found = SavedModel(folder, manifest, config, model, average)
    saved = shapes_in(found.index)
    if wrong := files.shape_problem(saved, state_dict.model_state(model.state_dict())):
        raise DamagedCheckpoint(
            f"{folder} does not have the model that its {MANIFEST} describes: it {wrong}"
        )
    if average and not any(name.startswith("ema.") for name in saved):
        raise UserError(
            f"{folder} has no moving average of its weights: the run had no training.ema_decay"
        )
    return found


def open_last(
    folder: PurePath, step: int | None, count: int, average: bool = False
) -> list[SavedModel]:
    """Open the models of the last `count` checkpoints of a run, up to `step`, newest first.

    Raises as `open_model` does, and if there are fewer.
    """
    newest = open_model(folder, step, average)
    if count == 1:
        return [newest]
    found = [
        path
        for path in folders.checkpoints(folders.folder_of(folder))
        if folders.step_of(path) <= newest.step
    ]
    if len(found) < count:
        raise UserError(
            f"{folder} has {len(found)} checkpoints up to step {newest.step}: lower --average"
        )
    earlier = reversed(found[-count:-1])
    return [newest, *(open_model(path, average=average) for path in earlier)]


def checkpoint_of(run: PurePath, step: int) -> PurePath:
    """Return the checkpoint of a run's `step`. Raises `UserError` if there is none."""
    folder = folders.folder_of(run)
    found = {folders.step_of(path): path for path in folders.checkpoints(folder)}
    if not found:
        raise folders.no_checkpoint(run)
    if step not in found:
        there_are = ", ".join(map(str, found))
        raise UserError(f"{run} has no checkpoint of step {step}: there are {there_are}")
    return found[step]


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
        raise UserError(f"{folder} has no tokenizer.json: put the model's file there")
    return found


def load_model(
    folder: PurePath, step: int | None = None
) -> tuple[Model, Tokenizer, ResolvedConfig]:
    """Load a model on the CPU. Return it, its tokenizer and its config.

    `folder` and `step` are as in `open_any`. Raises `UserError` and `DamagedCheckpoint`.
    """
    found = open_any(folder, step)
    model = found.model.to_empty(device="cpu")
    found.fill(model.state_dict())
    return model, found.tokenizer, found.config


def check_length(model: Model, length: int) -> None:
    """Raise `UserError` if positions of `model` would depend on how long a sequence is."""
    args = model.args
    if getattr(args, "rope_scaling", "") == "dynamic" and length > args.original_len:
        raise UserError(
            f"a prompt and what comes after it are {length:,} tokens, and the rotary positions of "
            f'the model (model.rope_scaling = "dynamic") go to {args.original_len:,}: shorten the '
            "prompt, or lower max_tokens"
        )


def load_sharded_model(
    folder: PurePath, layout: Layout, dtype: ComputeDtype, step: int | None = None
) -> tuple[ParallelModel, Tokenizer]:
    """Load a model onto ranks that share its weights by FSDP. Return it and its tokenizer.

    `folder` and `step` are as in `open_any`. Called by every rank; each reads its own part only.
    `dtype` is the model's dtype of compute. Raises `UserError` and `DamagedCheckpoint`, on every
    rank.
    """
    found = layout.on_first(lambda: open_any(folder, step))
    config, tokenizer = found.config, found.tokenizer
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
    layout.on_all(lambda: found.fill(model.tensors))
    model.follow_weights()
    return model, tokenizer


def init_from(
    source: str, with_optimizer: bool, layout: Layout, model: ParallelModel, optimizer: MARS
) -> tuple[str, list[Tensor]]:
    """Fill `model`, and `with_optimizer` the state that `optimizer` shares with the source's.

    `source` is as in checkpoint.init_from. Called by every rank. Returns it in words, and the
    parameters whose state came without the last gradient that their rule keeps. Raises `UserError`.
    """
    found = layout.on_first(lambda: open_source(source, model.whole))
    if not isinstance(found, SavedModel):
        if with_optimizer:
            raise UserError(
                f"checkpoint.init_optimizer: {source} holds weights only: "
                "name a run or a checkpoint in checkpoint.init_from"
            )
        layout.on_all(lambda: files.load_weights(found, model.tensors))
        model.follow_weights()
        return f"weights of {source}", []
    names = found.manifest.optimizer
    state = state_dict.model_state(model.tensors)
    origin, without = f"weights of {found.folder}", list[str]()
    if with_optimizer:
        taken, without = shared_state(optimizer, names)
        shared = tuple(f"optimizer.{name}." for name in taken)
        saved = layout.on_all(lambda: shapes_in(found.index))
        ours = state_dict.optimizer_state(optimizer).items()
        state |= {name: value for name, value in ours if name.startswith(shared) and name in saved}
        counts = f"{len(taken)} of {counted(len(names), 'tensor')}"
        origin += f", and the optimizer's state of {counts}"
        origin += f" ({len(without)} without a last gradient)" if without else ""
    layout.on_all(lambda: read_tensors(found.folder, state, found.index))
    model.follow_weights()
    parameters = state_dict.named_parameters(optimizer)
    return origin, [parameters[name] for name in without]


def check_init_from(config: ResolvedConfig, model: Model) -> None:
    """Raise `UserError` if no run of `model` can start as checkpoint.init_from says.

    A tokenizer that is not that of the model there is told.
    """
    source, tokenizer = str(config.checkpoint.init_from), config.data.tokenizer
    open_source(source, model, "size")
    if wrong := other_tokenizer(source, tokenizer):
        say(f"warning: data.tokenizer = {tokenizer}: {wrong}", error=True)


def open_source(
    source: str, model: Model, level: Level = "full"
) -> SavedModel | dict[str, files.SavedWeight]:
    """Return the model of a checkpoint that checkpoint.init_from names, or where bare weights lie.

    Raises `UserError` if it is not there, of other shapes than `model`, or if `model` multiplies
    other numbers ([transfer]).
    """
    bare, before = Path(source), Multipliers()
    try:
        found: SavedModel | dict[str, files.SavedWeight]
        if source.startswith(HF):
            found = files.weights_of_folder(find_folder(source)[0], model)
        elif source.endswith(".safetensors"):
            found = files.weights_of_file(bare)
        elif is_folder_of_transformers(bare):
            raise UserError(f"{source} is a folder of transformers: write {HF}{source}")
        elif files.has_weights(bare):
            found = files.weights_in(bare)
        else:
            found = open_model(place(source), level=level)
            before = found.model.args.multipliers
    except UserError as error:
        wrong = str(error) if source in str(error) else f"{source}: {error}"
        raise UserError(f"checkpoint.init_from: {wrong}") from None
    weights = model.state_dict()
    if isinstance(found, SavedModel):
        there = {name: tuple(value.shape) for name, value in found.model.state_dict().items()}
        wrong = files.shape_problem(there, weights)
    else:
        wrong = files.weights_problem(found, weights)
    if wrong:
        remedy = "set [model], data.tokenizer and training.seq_len as they were there"
        raise UserError(f"checkpoint.init_from: {source} {wrong}: {remedy}")
    if before != model.args.multipliers:
        raise UserError(
            f"checkpoint.init_from: the model of {source} multiplies by {before}, the config's by "
            f"{model.args.multipliers}: set [transfer] as it was there, or remove it"
        )
    return found


def shared_state(optimizer: MARS, saved: dict[str, str]) -> tuple[list[str], list[str]]:
    """Return the parameters whose state can be taken, and those that lack the last gradient.

    They are named. `saved` is the `optimizer` of the manifest that the state is taken from.
    """
    taken, without = [], []
    for name, wanted in state_dict.optimizer_state_names(optimizer).items():
        rule, *needed = wanted.split()
        saved_rule, *saved_keys = saved.get(name, "").split() or ["none"]
        if state_fits(rule, needed, saved_rule, saved_keys):
            taken.append(name)
            if set(needed) - set(saved_keys):
                without.append(name)
    return taken, without
