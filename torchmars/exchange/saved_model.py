"""A model that is saved: to use it without an optimizer, and to start a new run from its weights.

It is that of a checkpoint, of a folder of Hugging Face's transformers or its hub, or bare weights.
"""

import contextlib
import os
import re
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
from torchmars.config.load import Tables, config_from_tables
from torchmars.config.model_args import Multipliers
from torchmars.config.sections import HF, RunConfig
from torchmars.config.training import Float8Config
from torchmars.core.check import parse_json
from torchmars.core.console import say
from torchmars.core.errors import UserError, needs_package
from torchmars.core.files import read_text
from torchmars.core.places import place
from torchmars.core.words import counted
from torchmars.data.tokenizer import Tokenizer, load_tokenizer
from torchmars.exchange import weights as files
from torchmars.exchange.families import from_config
from torchmars.exchange.tokenizer_files import FolderTokenizer
from torchmars.models import Model, build_meta_model, build_run_model
from torchmars.models.documents import document_starts
from torchmars.optim import MARS
from torchmars.optim.rules import state_fits
from torchmars.parallel.layout import Layout
from torchmars.parallel.parallel_model import ParallelModel
from torchmars.storage.storage import MANIFEST

ComputeDtype = Literal["float32", "bfloat16"]
Level = Literal["full", "size"]
CONFIG, ADAPTER, TOKENIZER = "config.json", "adapter_config.json", "tokenizer.json"
UNTIED = "it is loaded as model.tied = false"
LONGEST = 8192  # of the sequences to train on, where a model takes any
NAME = re.compile(r"([\w-][\w.-]*(?:/[\w.-]+)?)(?:@([\w./-]+))?")  # NAME or NAME@REVISION
# All that is read of a model of the hub. Nothing else is fetched, so that no pickle is.
FILES = [CONFIG, ADAPTER, files.WEIGHTS, files.INDEX, "model-*-of-*.safetensors", TOKENIZER]
FILES += ["tokenizer_config.json", "generation_config.json"]
# By which tokenizers are told apart.
SAMPLE = "The quick brown fox's 12345 jumps,  over\n\n  the lazy\tdog — naïve 北京."


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

    @cached_property
    def index(self) -> dcp.Metadata:
        """Where its tensors lie."""
        return read_index(self.folder, self.manifest)

    def __getstate__(self) -> dict[str, Any]:
        """An index of many ranks is too large to be sent: other ranks read it."""
        return {name: value for name, value in vars(self).items() if name != "index"}

    def read(self, name: str) -> Tensor:
        """Return a weight. Raises `DamagedCheckpoint`."""
        value = torch.empty(self.model.state_dict()[name].shape)
        self.fill({name: value})
        return value

    def fill(self, weights: Mapping[str, Tensor]) -> None:
        """Fill `weights`, sharded or not, by name. Raises `DamagedCheckpoint`."""
        # No average is made of buffers.
        own = dict(self.model.named_buffers()) if self.average else weights
        averaged = {name: each for name, each in weights.items() if name not in own}
        others = {name: each for name, each in weights.items() if name in own}
        state = state_dict.average_state(averaged) | state_dict.model_state(others)
        read_tensors(self.folder, state, self.index)

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


@dataclass(frozen=True)
class FolderModel:
    """A model in a folder of transformers, whose weights are still on the disk."""

    tables: Tables
    """Of a config that trains on from it. One without [data] has no tokenizer."""
    config: ResolvedConfig
    model: Model
    """Without memory."""
    weights: dict[str, files.SavedWeight]
    """Where each weight of `model` lies."""

    def fill(self, weights: Mapping[str, Tensor]) -> None:
        """Fill `weights`, sharded or not, by name. Raises `UserError`."""
        files.load_weights(self.weights, weights)

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the folder. Raises `UserError`."""
        return FolderTokenizer(self.config.data.tokenizer)


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


def is_folder_of_transformers(path: PurePath) -> bool:
    """Return whether `path` is a folder of transformers. A run and a checkpoint are none.

    So is a name that begins with "hf:".
    """
    own = any(os.path.isfile(path / name) for name in (CONFIG, ADAPTER))
    return own or str(path).startswith(HF)


def is_of_hub(source: str) -> bool:
    """Return whether a name after "hf:" is none of a folder, and may be one of the hub."""
    name = source.removeprefix(HF)
    return name != source and NAME.fullmatch(name) is not None and not os.path.lexists(name)


def find_folder(source: str) -> tuple[Path, str]:
    """Return the folder of a path, or of "hf:" and a name, and the name for checkpoint.init_from.

    A model of the hub is fetched into the hub's own cache. Its name has the commit, so that it
    means the same weights for good. Raises `UserError`, also for a folder without weights.
    """
    if is_of_hub(source):
        folder, source = fetch(source.removeprefix(HF))
    else:
        folder = Path(os.path.expanduser(source.removeprefix(HF)))
        source = f"{HF}{folder.resolve()}"
    if not os.path.lexists(folder):
        of_hub = f"{HF}{folder}"
        more = f": {of_hub} names that model of the hub" if is_of_hub(of_hub) else ""
        raise UserError(f"there is no folder {folder}{more}")
    if not files.has_weights(folder):
        raise files.no_weights(folder)
    return folder, source


def fetch(name: str) -> tuple[Path, str]:
    """Return the folder of a model of the hub, and its name with the commit. Raises `UserError`."""
    what = f"there is no folder {name}: the model of the hub"
    with needs_package("huggingface_hub", what):
        from huggingface_hub import snapshot_download
    repository, _, revision = name.partition("@")
    try:
        # The cache has a folder for each commit.
        found = snapshot_download(repository, revision=revision or None, allow_patterns=FILES)
    except Exception as error:  # whatever its network, its cache or the hub have raised
        first = str(error).partition("\n")[0]
        raise UserError(
            f"{what} cannot be fetched ({type(error).__name__}: {first}): check the name and the "
            "network, and for a model that asks for consent HF_TOKEN"
        ) from None
    return Path(found), f"{HF}{repository}@{Path(found).name}"


def open_folder(named: PurePath) -> FolderModel:
    """Open a model in a folder of transformers, for inference or to train on from it.

    `named` is its path, or "hf:" and its path or its name on the hub. A head that its config.json
    ties to the token table, and that is another, is not tied: that is told. Raises `UserError`.
    """
    try:
        folder, source = find_folder(str(named))
        tables = tables_of(folder, source)
        try:
            found = model_in(folder, tables)
        except files.OtherHead:
            if not tables["model"].get("tied"):
                raise
            say(f"warning: {folder}: {files.HEAD} has other values: {UNTIED}", error=True)
            tables["model"]["tied"] = False
            found = model_in(folder, tables)
        there = {name: place.shape for name, place in found.weights.items()}
        if wrong := files.shape_problem(there, found.model.state_dict()):
            raise UserError(f"it {wrong}")
        check_tokenizer(folder, found)
    except UserError as error:
        raise UserError(f"{named} cannot be opened: {error}") from None
    return found


def tables_of(folder: Path, source: str) -> Tables:
    """Return the tables of a config that trains on from a `source`. Raises `UserError`."""
    try:
        model = from_config(parse_json(read_text(folder / CONFIG)))
    except (OSError, ValueError) as error:
        raise UserError(f"its {CONFIG} cannot be read: {error}") from None
    seq_len = model.pop("seq_len")
    if model["name"] != "gpt2":  # rotary positions take any length
        seq_len = min(seq_len, LONGEST)
    tables: Tables = {
        "run": {"name": PurePath(source.removeprefix(HF)).name.partition("@")[0]},
        "model": model,
        "training": {"seq_len": seq_len},
        "checkpoint": {"init_from": source},
    }
    if (folder / TOKENIZER).exists():
        # Of a cache, the file is a link to one that has no tokenizer_config.json beside it.
        tables["data"] = {"tokenizer": str(folder.resolve() / TOKENIZER)}
    return tables


def model_in(folder: Path, tables: Tables) -> FolderModel:
    """Return the model of a folder's tables. Raises `UserError`."""
    config = config_from_tables(tables, f"from {folder / CONFIG}")
    model = build_meta_model(config.model, 1, config.training.seq_len).eval()
    return FolderModel(tables, config, model, files.weights_of_folder(folder, model))


def check_tokenizer(folder: Path, found: FolderModel) -> None:
    """Raise `UserError` if it is not a tokenizer, or has ids that the model has no rows for."""
    if "data" not in found.tables:
        return  # it has none, which is told elsewhere
    tokenizer, rows = load_tokenizer(found.config.data.tokenizer), found.model.vocab_rows
    largest = max(tokenizer.vocab_size - 1, tokenizer.end_of_text)
    if largest >= rows:
        raise UserError(
            f"the largest id of its tokenizer is {largest:,}, and the model has {rows:,} rows: let "
            "resize_token_embeddings of transformers add rows, and save the model again"
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
    begin, end = tokenizer.begin_token, tokenizer.end_of_text
    find_starts = partial(document_starts, end_of_text=end, begin_token=begin)
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


def other_tokenizer(source: str, name: str) -> str:
    """Return why data.tokenizer, which is `name`, is not that of the model of `source`, or "".

    `source` is as in checkpoint.init_from. Raises `UserError` if the model is not to be had.
    """
    if not source.startswith(HF):
        return ""
    file = find_folder(source)[0] / TOKENIZER
    if not file.exists():
        remedy = "name the one that the model was trained with"
        return f"{source} has no {TOKENIZER}: {remedy}" if name == "bytes" else ""
    both = load_tokenizer(name), load_tokenizer(str(file))
    with contextlib.suppress(UserError):  # the package is not there
        ours, theirs = (each.encode(SAMPLE).tolist() for each in both)
        if ours != theirs:
            return f"it gives other tokens than {file}, which the model was trained with"
    return ""


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
    values = found.model.state_dict() if isinstance(found, SavedModel) else found
    there = {name: tuple(value.shape) for name, value in values.items()}
    if wrong := files.shape_problem(there, model.state_dict()):
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
