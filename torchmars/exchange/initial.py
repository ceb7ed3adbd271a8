"""The start of a new run from weights: another run's checkpoint, or exported ones."""

from pathlib import Path, PurePath
from typing import Literal

from torch import Tensor

from torchmars.checkpoint.manifest import CheckpointManifest
from torchmars.checkpoint.reader import read_index, read_tensors, shapes_in
from torchmars.checkpoint.resume import find_checkpoint
from torchmars.checkpoint.state_dict import (
    model_state,
    named_parameters,
    optimizer_state,
    optimizer_state_names,
)
from torchmars.config.checkpoint import HF
from torchmars.config.load import config_from_tables
from torchmars.config.model_args import Multipliers
from torchmars.core.console import say
from torchmars.core.errors import UserError
from torchmars.core.places import place
from torchmars.core.words import counted
from torchmars.exchange.folder import is_folder_of_transformers
from torchmars.exchange.hub import find_folder
from torchmars.exchange.weight_files import (
    SavedWeight,
    load_weights,
    shape_problem,
    weights_of_file,
    weights_problem,
)
from torchmars.exchange.weights import weights_of_folder
from torchmars.models import Model, build_run_model
from torchmars.optim import MARS
from torchmars.optim.rules import state_fits
from torchmars.parallel.layout import Layout
from torchmars.parallel.parallel_model import ParallelModel
from torchmars.storage.storage import MANIFEST

REMEDY = "set [model], data.tokenizer and training.seq_len as they were there"


def init_from(
    source: str, with_optimizer: bool, layout: Layout, model: ParallelModel, optimizer: MARS
) -> tuple[str, list[Tensor]]:
    """Fill `model`, and `with_optimizer` the state that `optimizer` shares with the source's.

    `source` is a checkpoint, a run, whose newest good checkpoint is taken, a .safetensors file, or
    "hf:" and a folder that transformers wrote, or a model of the hub.
    Called by every rank. Returns the source, in words, and the parameters whose state came without
    the last gradient that their rule keeps. Raises `UserError`.
    """
    saved_weights = layout.on_first(lambda: weights_of(source, model.whole))
    if saved_weights is not None:
        if with_optimizer:
            raise UserError(
                f"checkpoint.init_optimizer: {source} holds weights only: "
                "name a run or a checkpoint in checkpoint.init_from"
            )
        layout.on_all(lambda: load_weights(saved_weights, model.tensors))
        model.follow_weights()
        return f"weights of {source}", []
    folder, manifest = layout.on_first(lambda: open_source(place(source), "full", model.whole))
    state = model_state(model.tensors)
    ours = optimizer_state(optimizer) if with_optimizer else {}
    index = layout.on_all(lambda: read_index(folder, manifest))
    saved = shapes_in(index)
    sizes = {
        name.removeprefix("model."): size
        for name, size in saved.items()
        if name.startswith("model.")
    }
    if wrong := shape_problem(sizes, model.tensors):
        raise UserError(f"checkpoint.init_from: {folder} {wrong}: {REMEDY}")
    origin = f"weights of {folder}"
    without: list[str] = []
    if with_optimizer:
        taken, without = shared_state(optimizer, manifest.optimizer)
        shared = tuple(f"optimizer.{name}." for name in taken)
        state |= {
            name: value for name, value in ours.items() if name.startswith(shared) and name in saved
        }
        counts = f"{len(taken)} of {counted(len(manifest.optimizer), 'tensor')}"
        origin += f", and the optimizer's state of {counts}"
        origin += f" ({len(without)} without a last gradient)" if without else ""
    layout.on_all(lambda: read_tensors(folder, state, index))
    model.follow_weights()
    parameters = named_parameters(optimizer)
    return origin, [parameters[name] for name in without]


def weights_of(source: str, model: Model) -> dict[str, SavedWeight] | None:
    """Return where the weights of `model` lie in files of weights alone; None for a checkpoint.

    `source` is as in checkpoint.init_from. Raises `UserError` if they are not all there, and where
    `model` would multiply what they compute.
    """
    try:
        if source.startswith(HF):
            saved = weights_of_folder(find_folder(source)[0], model)
        elif source.endswith(".safetensors"):
            saved = weights_of_file(Path(source))
        else:
            return None
    except UserError as error:
        raise UserError(f"checkpoint.init_from: {source}: {error}") from None
    if wrong := weights_problem(saved, model.state_dict()):
        raise UserError(f"checkpoint.init_from: {source} {wrong}: {REMEDY}")
    if model.args.multipliers != Multipliers():
        raise UserError(
            f"checkpoint.init_from: {source} has weights of a model that multiplies nothing, and "
            f"[transfer] multiplies ({model.args.multipliers}): remove [transfer]"
        )
    return saved


def open_source(
    source: PurePath, level: Literal["full", "size"], model: Model
) -> tuple[PurePath, CheckpointManifest]:
    """Return the checkpoint that checkpoint.init_from names.

    Raises `UserError` without one, and if its model multiplies by other numbers than `model`.
    """
    try:
        folder, manifest = find_checkpoint(source, say, level)
    except UserError as error:
        theirs = is_folder_of_transformers(Path(source))
        wrong = f"{source} is a folder of transformers: write {HF}{source}" if theirs else error
        raise UserError(f"checkpoint.init_from: {wrong}") from None
    before, now = multipliers_in(folder, manifest), model.args.multipliers
    if before != now:
        raise UserError(
            f"checkpoint.init_from: the model of {folder} multiplies by {before}, the config's by "
            f"{now}: set [transfer] as it was there"
        )
    return folder, manifest


def multipliers_in(folder: PurePath, manifest: CheckpointManifest) -> Multipliers:
    """Return the multipliers of the model of a checkpoint. Raises `UserError`."""
    config = config_from_tables(manifest.config, f"in {folder}/{MANIFEST}")
    found: Multipliers = build_run_model(config, manifest.vocab_size).args.multipliers
    return found


def shared_state(optimizer: MARS, saved: dict[str, str]) -> tuple[list[str], list[str]]:
    """Return the parameters whose state can be taken, and those that lack the last gradient.

    They are named. `saved` is the `optimizer` of the manifest that the state is taken from.
    """
    taken, without = [], []
    for name, wanted in optimizer_state_names(optimizer).items():
        rule, *needed = wanted.split()
        saved_rule, *saved_keys = saved.get(name, "").split() or ["none"]
        if state_fits(rule, needed, saved_rule, saved_keys):
            taken.append(name)
            if set(needed) - set(saved_keys):
                without.append(name)
    return taken, without
