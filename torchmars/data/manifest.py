"""The on-disk format: shards of tokens, and a JSON manifest of their contents.

A folder has `manifest.json` and, for each split, files such as `train-00000-000.bin` of
little-endian tokens without a header, uint16 or uint32 as the manifest says. The numbers are those
of a piece of the corpus, and of a shard of it. The manifest is written last, so a folder without
one is unfinished. Where another program made
the tokens (see foreign.py), the folder has the manifest alone, whose shards are parts of that
program's files.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from torchmars.config import DataConfig
from torchmars.core.bounds import Bounds, Name, Place, Range
from torchmars.core.errors import UserError
from torchmars.core.files import write_durably
from torchmars.core.formats import Format
from torchmars.data.tokenizer import TokenDtype, Tokenizer, VocabularySize, load_tokenizer

NAME = "manifest.json"
FORMAT = Format(
    "torchmars-shards",
    6,
    "use the version of torchmars that wrote it, or set data.path to a new folder",
)
SPLITS = ("train", "validation")
TokenCount = Annotated[int, Range(0, 10**15)]


@dataclass(frozen=True)
class ShardFile(Bounds):
    """Bounds of a shard's file: a name within its folder, or the absolute path of any file."""

    def check(self, value: str) -> str:
        """Return such a name. Raises `ValueError` for another text."""
        return Place().check(value) if value.startswith("/") else Name("file").check(value)


@dataclass
class Shard:
    """Tokens that lie in one file, which is all that file has unless its path is absolute."""

    file: Annotated[str, ShardFile()]
    tokens: Annotated[int, Range(1, 10**15)]
    sha256: str
    """Of the bytes of these tokens."""
    offset: Annotated[int, Range(0, 2**62)] = 0
    """Bytes of the file before the first token."""


@dataclass
class Split:
    """The shards of one split, in order, and their contents."""

    tokens: TokenCount = 0
    documents: TokenCount = 0
    max_token: Annotated[int, Range(0, 2**32 - 1)] = 0
    shards: list[Shard] = field(default_factory=list)


@dataclass
class DataManifest:
    """The contents of a folder of shards, and its sources."""

    tokenizer: str
    vocab_size: VocabularySize
    source: str
    files: list[str]
    splits: dict[str, Split]
    dtype: TokenDtype
    """The dtype of the shards' tokens."""
    validation_fraction: float
    tokenizer_sha256: str | None
    """Of the file that the tokenizer was read from; None for one that has a name."""
    text_bytes: dict[str, Annotated[int, Range(0, 10**16)]]
    """Of the documents of each split, in UTF-8; empty for another program's tokens."""
    end_of_text: Annotated[int, Range(0, 2**32 - 1)]
    """The token that ends a document."""
    begin_token: Annotated[int, Range(0, 2**32 - 1)] | None = None
    """The token that begins one, after that; None: no other one."""
    validation_files: list[str] = field(default_factory=list)
    """Of another program's tokens, as the config names them."""
    corpus: list[str] = field(default_factory=list)
    """The files that were tokenised, in their order."""

    def fingerprint(self) -> str:
        """Return a hash of the training tokens and their order."""
        shards = "".join(shard.sha256 for shard in self.splits["train"].shards)
        return hashlib.sha256(shards.encode()).hexdigest()


def numpy_dtype(dtype: TokenDtype) -> np.dtype:
    """Return how the tokens of shards lie on the disk."""
    return np.dtype(dtype).newbyteorder("<")


def make_manifest(
    config: DataConfig,
    tokenizer: Tokenizer,
    splits: dict[str, Split],
    dtype: TokenDtype,
    text_bytes: dict[str, int] | None = None,
    corpus: Sequence[str] = (),
) -> DataManifest:
    """Return the manifest of shards that were made for `config`, of the files of a `corpus`.

    `text_bytes` are counted for each split, if at all.
    """
    return DataManifest(
        tokenizer.name,
        tokenizer.vocab_size,
        config.source,
        config.files,
        splits,
        dtype,
        config.validation_fraction,
        tokenizer.sha256,
        text_bytes or {},
        tokenizer.end_of_text,
        tokenizer.begin_token,
        config.validation_files,
        list(corpus),
    )


def has_manifest(folder: Path) -> bool:
    """Return whether a folder of shards is complete."""
    return os.path.exists(folder / NAME)


def write_manifest(folder: Path, manifest: DataManifest) -> None:
    """Write the manifest, durably, to the folder of its shards. Raises `OSError`."""
    write_durably(folder / NAME, FORMAT.text(asdict(manifest)))


def read_manifest(folder: Path) -> DataManifest:
    """Return the manifest of `folder`.

    Raises `UserError` if it is damaged, and `OtherVersion` where another version wrote it.
    """
    path = folder / NAME
    try:
        manifest = FORMAT.read(path, DataManifest)
        check_splits(manifest)
        return manifest
    except OSError as error:
        raise UserError(
            f"cannot read {path}: {error.strerror}: prepare it with torchmars prepare"
        ) from None
    except ValueError as error:
        raise UserError(
            f"{path} is no manifest of this version ({error}): "
            f"remove the folder {folder} and prepare it again"
        ) from None


def check_splits(manifest: DataManifest) -> None:
    """Raise `ValueError` if the manifest contradicts itself about its splits."""
    if set(manifest.splits) != set(SPLITS):
        raise ValueError("its splits are not train and validation")
    if not manifest.splits["train"].shards:
        raise ValueError("its training split is empty")
    for split in manifest.splits.values():
        if split.tokens != sum(shard.tokens for shard in split.shards):
            raise ValueError("the tokens of a split are not those of its shards")
        if split.max_token > np.iinfo(manifest.dtype).max:
            raise ValueError(f"a token id does not fit {manifest.dtype}")


def shard_settings(config: DataConfig) -> dict[str, Any]:
    """Return what shards depend on, by name. Raises `UserError`."""
    tokenizer = load_tokenizer(config.tokenizer, config.begin_token)
    return compared(make_manifest(config, tokenizer, {}, "uint16"))


def compared(manifest: DataManifest) -> dict[str, Any]:
    """Return those fields of a manifest that a config decides on, by name."""
    file = manifest.tokenizer_sha256  # whichever its path
    return {
        "data.source": manifest.source,
        "data.files": manifest.files,
        "data.validation_files": manifest.validation_files,
        "data.tokenizer": manifest.tokenizer if file is None else f"a file of SHA-256 {file}",
        "the tokenizer's end of text": manifest.end_of_text,
        "data.begin_token": manifest.begin_token,
        "data.validation_fraction": manifest.validation_fraction,
    }


def first_difference(found: dict[str, Any], wanted: dict[str, Any]) -> str:
    """Return the first difference of two dictionaries in words; "" if there is none."""
    for name in {**wanted, **found}:
        old, new = (json.dumps(each.get(name), ensure_ascii=False) for each in (found, wanted))
        if old != new:
            return f"{name} = {old}, now it is {new}"
    return ""


def check_manifest(manifest: DataManifest, config: DataConfig, folder: Path) -> None:
    """Raise `UserError` if `folder` was made from something else than the config asks for."""
    found, wanted = compared(manifest), shard_settings(config)
    if not config.files:  # a run may name the folder alone
        del found["data.files"], wanted["data.files"]
    if differs := first_difference(found, wanted):
        raise UserError(
            f"{folder} was prepared with {differs}: set it back, set data.path to another folder, "
            "or remove this one to prepare it again"
        )
