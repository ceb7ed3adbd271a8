"""Models in folders of Hugging Face's transformers and on its hub, to use and to train on from."""

import contextlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath

from torch import Tensor

from torchmars.config import ResolvedConfig
from torchmars.config.load import Tables, config_from_tables
from torchmars.config.sections import HF
from torchmars.core.check import parse_json
from torchmars.core.console import say
from torchmars.core.errors import UserError, needs_package
from torchmars.core.files import read_text
from torchmars.data.tokenizer import Tokenizer, load_tokenizer
from torchmars.exchange import weights as files
from torchmars.exchange.families import from_config
from torchmars.exchange.tokenizer_files import FolderTokenizer
from torchmars.models import Model, build_meta_model

CONFIG, ADAPTER, TOKENIZER = "config.json", "adapter_config.json", "tokenizer.json"
LONGEST = 8192  # of the sequences to train on, where a model takes any
NAME = re.compile(r"([\w-][\w.-]*(?:/[\w.-]+)?)(?:@([\w./-]+))?")  # NAME or NAME@REVISION
# All that is read of a model of the hub. Nothing else is fetched, so that no pickle is.
FILES = [
    *(CONFIG, ADAPTER, "generation_config.json"),
    *(files.WEIGHTS, files.INDEX, "model-*-of-*.safetensors"),
    *(TOKENIZER, "tokenizer_config.json", "special_tokens_map.json"),
]
# By which tokenizers are told apart.
SAMPLE = "The quick brown fox's 12345 jumps,  over\n\n  the lazy\tdog — naïve 北京."


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


def is_folder_of_transformers(path: PurePath) -> bool:
    """Return whether `path` is a folder of transformers. A run and a checkpoint are none.

    So is a name that begins with "hf:".
    """
    names = (path / CONFIG, path / ADAPTER)
    return any(map(os.path.isfile, names)) or str(path).startswith(HF)


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
        folder = Path(
            snapshot_download(repository, revision=revision or None, allow_patterns=FILES)
        )
    except Exception as error:  # whatever its network, its cache or the hub have raised
        first = str(error).partition("\n")[0]
        raise UserError(
            f"{what} cannot be fetched ({type(error).__name__}: {first}): check the name and the "
            "network, and for a model that asks for consent HF_TOKEN"
        ) from None
    return folder, f"{HF}{repository}@{folder.name}"


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
            say(
                f"warning: {folder}: its {CONFIG} ties the head to the token table, but its "
                f"{files.HEAD} has other values: it is loaded as model.tied = false",
                error=True,
            )
            tables["model"]["tied"] = False
            found = model_in(folder, tables)
        if wrong := files.weights_problem(found.weights, found.model.state_dict()):
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
            f"the largest id of its tokenizer is {largest:,}, and the model has {rows:,} rows: it "
            "is another model's, or tokens were added to it: take them out, or let "
            "resize_token_embeddings of transformers add rows, and save the model again"
        )


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
        ours, theirs = (each.encode_batch([SAMPLE])[0].tolist() for each in both)
        if ours != theirs:
            return f"it gives other tokens than {file}, which the model was trained with"
    return ""
