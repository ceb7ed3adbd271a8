"""Models in folders of Hugging Face's transformers, to use and to train on from."""

import os
from dataclasses import dataclass
from pathlib import Path, PurePath

from torchmars.config import ResolvedConfig
from torchmars.config.checkpoint import HF
from torchmars.config.load import config_from_tables
from torchmars.config.toml_files import Tables
from torchmars.core.console import say
from torchmars.core.errors import UserError
from torchmars.data.tokenizer import load_tokenizer
from torchmars.exchange.from_config import from_config, left_to_class
from torchmars.exchange.hub import find_folder
from torchmars.exchange.weight_files import SavedWeight, no_content, weights_problem
from torchmars.exchange.weights import (
    ADAPTER,
    CONFIG,
    HEAD,
    has_other_head,
    read_config,
    weights_of_folder,
)
from torchmars.models import Model, build_meta_model

TOKENIZER = "tokenizer.json"
LONGEST = 8192  # of the sequences to train on, where a model takes any


@dataclass(frozen=True)
class FolderModel:
    """A model in a folder of transformers, whose weights are still on the disk."""

    tables: Tables
    """Of a config that trains on from it."""
    config: ResolvedConfig
    model: Model
    """Without memory."""
    weights: dict[str, SavedWeight]
    """Where each weight of `model` lies."""


def is_folder_of_transformers(path: PurePath) -> bool:
    """Return whether `path` is a folder of transformers. A run and a checkpoint are none.

    So is a name that begins with "hf:".
    """
    files = (path / CONFIG, path / ADAPTER)
    return any(map(os.path.isfile, files)) or str(path).startswith(HF)


def open_folder(named: PurePath) -> FolderModel:
    """Open a model in a folder of transformers, for inference or to train on from it.

    `named` is its path, or "hf:" and its path or its name on the hub.
    A head that its config.json ties to the token table, and that is another, is not tied: that is
    told. Raises `UserError` for a model that is none of ours, for weights other than its
    config.json asks for, and for a tokenizer with more tokens than the model has rows.
    """
    try:
        folder, source = find_folder(str(named))
        tables = tables_of(folder, source)
        config, model = model_of(folder, tables)
        if tables["model"].get("tied") and has_other_head(folder, model):
            say(
                f"warning: {folder}: its {CONFIG} ties the head to the token table, but its "
                f"{HEAD} has other values: it is loaded as model.tied = false",
                error=True,
            )
            tables["model"]["tied"] = False
            config, model = model_of(folder, tables)
        try:
            weights = weights_of_folder(folder, model)
            if wrong := weights_problem(weights, model.state_dict()):
                raise UserError(f"it {wrong}")
        except UserError as error:
            sizes = ", ".join(left_to_class(read_config(folder)))
            left = f" (its {CONFIG} leaves {sizes} to the defaults of the class)" if sizes else ""
            raise UserError(f"{error}{left}") from None
        check_tokenizer(folder, config, model)
    except UserError as error:
        raise UserError(f"{named} cannot be opened: {error}") from None
    return FolderModel(tables, config, model, weights)


def model_of(folder: Path, tables: Tables) -> tuple[ResolvedConfig, Model]:
    """Return the config of a folder's tables, and its model without memory. Raises `UserError`."""
    config = config_from_tables(tables, f"from {folder / CONFIG}")
    return config, build_meta_model(config.model, 1, config.training.seq_len).eval()


def check_tokenizer(folder: Path, config: ResolvedConfig, model: Model) -> None:
    """Raise `UserError` if it is not a tokenizer, or belongs to another model."""
    if reason := no_content(folder / TOKENIZER):
        raise UserError(f"its {TOKENIZER} cannot be read: {reason}")
    tokenizer = load_tokenizer(config.data.tokenizer)
    tokens = max(tokenizer.vocab_size, tokenizer.end_of_text + 1)
    if tokens > model.vocab_rows:
        raise UserError(
            f"its tokenizer has {tokens:,} tokens, its model {model.vocab_rows:,} rows for "
            "them: it is the tokenizer of another model"
        )


def tables_of(folder: Path, source: str) -> Tables:
    """Return the tables of a config that trains on from a folder, named `source` there.

    Raises `UserError`.
    """
    model_table = from_config(read_config(folder))
    seq_len = model_table.pop("seq_len")
    if model_table["name"] != "gpt2":  # rotary positions take any length
        seq_len = min(seq_len, LONGEST)
    tables: Tables = {
        "run": {"name": PurePath(source.removeprefix(HF)).name.partition("@")[0]},
        "model": model_table,
        "training": {"seq_len": seq_len},
        "checkpoint": {"init_from": source},
    }
    if (folder / TOKENIZER).exists():
        # Of a cache, the file is a link to one that has no tokenizer_config.json beside it.
        tables["data"] = {"tokenizer": str(folder.resolve() / TOKENIZER)}
    return tables
