"""The on-disk format: shards of tokens, and a JSON manifest of their contents.

A folder has `manifest.json` and, for each split, files such as `train-00000.bin`, numbered as
pieces of the corpus, of little-endian tokens without a header, uint16 or uint32 as the manifest
says. The manifest is written last: a folder without one is unfinished. Where another program made
the tokens (foreign.py), the folder has the manifest alone, whose shards are parts of its files.
"""

import functools
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from torchmars.config import DataConfig
from torchmars.core.errors import UserError
from torchmars.core.files import write_durably
from torchmars.core.formats import Format
from torchmars.data.tokenizer import TokenDtype, Tokenizer, VocabularySize, load_tokenizer

Level = Literal["full", "size", "off"]
NAME = "manifest.json"
FORMAT = Format(
    "torchmars-shards",
    7,
    "use the version of torchmars that wrote it, or set data.path to a new folder",
)
SPLITS = ("train", "validation")
REMEDY = "restore it, or remove the folder {} to prepare it again"


@dataclass
class Shard:
    """Consecutive tokens of one file."""

    file: str
    """Its name in the folder, or the absolute path of another program's."""
    tokens: int
    sha256: str = ""
    """Of the bytes of these tokens; empty until they are read."""
    offset: int = 0
    """Bytes of the file before the first token."""

    def part(self, begin: int, end: int, dtype: TokenDtype) -> "Shard":
        """Return tokens [begin, end) of these."""
        offset = self.offset + begin * numpy_dtype(dtype).itemsize
        return Shard(self.file, end - begin, offset=offset)


@dataclass
class Split:
    """The shards of one split, in order, and their contents."""

    tokens: int = 0
    documents: int = 0
    text_bytes: int = 0
    """Of its documents, in UTF-8; 0 for another program's tokens."""
    max_token: int = 0
    shards: list[Shard] = field(default_factory=list)

    def add(self, other: "Split") -> None:
        """Append what follows."""
        self.tokens += other.tokens
        self.documents += other.documents
        self.text_bytes += other.text_bytes
        self.max_token = max(self.max_token, other.max_token)
        self.shards += other.shards


@dataclass
class DataManifest:
    """The contents of a folder of shards, and its sources."""

    made_from: dict[str, Any]
    """What shards depend on, by name: `shard_settings`."""
    tokenizer: str
    tokenizer_sha256: str | None
    """Of the file that the tokenizer was read from; None for one that has a name."""
    vocab_size: VocabularySize
    end_of_text: int
    """The token that ends a document."""
    begin_token: int | None
    """The token that begins one, after that; None: no other one."""
    dtype: TokenDtype
    """The dtype of the shards' tokens."""
    splits: dict[str, Split]
    corpus: list[str] = field(default_factory=list)
    """The files that were tokenised, in their order."""


def numpy_dtype(dtype: TokenDtype) -> np.dtype:
    """Return how the tokens of shards lie on the disk."""
    return np.dtype(dtype).newbyteorder("<")


def has_manifest(folder: Path) -> bool:
    """Return whether a folder of shards is complete."""
    return os.path.exists(folder / NAME)


def write_manifest(
    folder: Path,
    config: DataConfig,
    tokenizer: Tokenizer,
    dtype: TokenDtype,
    splits: dict[str, Split],
    corpus: Iterable[str] = (),
) -> DataManifest:
    """Write the manifest of shards that were made for `config`, and return it. Raises `OSError`."""
    manifest = DataManifest(
        shard_settings(config, tokenizer),
        tokenizer.name,
        tokenizer.sha256,
        tokenizer.vocab_size,
        tokenizer.end_of_text,
        tokenizer.begin_token,
        dtype,
        splits,
        [*corpus],
    )
    write_durably(folder / NAME, FORMAT.text(asdict(manifest)))
    return manifest


def read_manifest(folder: Path) -> DataManifest:
    """Return the manifest of `folder`.

    Raises `UserError` if it is damaged, and `OtherVersion` where another version wrote it.
    """
    path = folder / NAME
    try:
        return FORMAT.read(path, DataManifest)
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path} is no manifest of this version ({error}): "
            f"remove the folder {folder} and prepare it again"
        ) from None


def shard_settings(config: DataConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return what shards depend on, by name."""
    file = tokenizer.sha256  # whichever its path
    return {
        "data.source": config.source,
        "data.files": config.files,
        "data.validation_files": config.validation_files,
        "data.tokenizer": tokenizer.name if file is None else f"a file of SHA-256 {file}",
        "the tokenizer's end of text": tokenizer.end_of_text,
        "data.begin_token": tokenizer.begin_token,
        "data.validation_fraction": config.validation_fraction,
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
    wanted = shard_settings(config, load_tokenizer(config.tokenizer, config.begin_token))
    if not config.files:  # a run may name the folder alone
        wanted["data.files"] = manifest.made_from["data.files"]
    if differs := first_difference(manifest.made_from, wanted):
        raise UserError(
            f"{folder} was prepared with {differs}: set it back, set data.path to another folder, "
            "or remove this one to prepare it again"
        )


def check_shards(
    manifest: DataManifest, folder: Path, part: int = 0, parts: int = 1, level: Level = "full"
) -> None:
    """Raise `UserError` naming the first shard that is missing, truncated or altered.

    The level "full" reads every byte, "size" none. `parts` ranks can share the work: each takes the
    shards `part`, `part + parts`, ...
    """
    if level == "off":
        return
    shards = [shard for split in manifest.splits.values() for shard in split.shards]
    check = functools.partial(check_shard, dtype=manifest.dtype, folder=folder, level=level)
    with ThreadPoolExecutor() as pool:  # hashing releases the interpreter lock
        list(pool.map(check, shards[part::parts]))


def check_shard(shard: Shard, dtype: TokenDtype, folder: Path, level: Level = "full") -> None:
    """Raise `UserError` if a shard is missing, truncated, altered or cannot be read."""
    path, wrong = folder / shard.file, ""
    end = shard.offset + shard.tokens * numpy_dtype(dtype).itemsize
    try:
        if (size := path.stat().st_size) < end:
            wrong = f"has {size} bytes, its manifest says at least {end}"
        elif level == "full" and read_shard(shard, dtype, folder).shards != [shard]:
            wrong = "was altered (its SHA-256 is not the manifest's)"
    except OSError as error:
        wrong = f"cannot be read ({error.strerror})"
    if wrong:
        raise UserError(f"the shard {path} {wrong}: {REMEDY.format(folder)}")


def read_shard(shard: Shard, dtype: TokenDtype, folder: Path, ends: int = -1) -> Split:
    """Return a shard with its SHA-256 and its largest token; the token `ends` ends its documents.

    Raises `OSError`.
    """
    digest, found, kind = hashlib.sha256(), Split(shard.tokens), numpy_dtype(dtype)
    for begin in range(0, shard.tokens, 2**21):
        at, size = shard.offset + begin * kind.itemsize, min(2**21, shard.tokens - begin)
        tokens = np.fromfile(folder / shard.file, kind, size, offset=at)
        digest.update(tokens.data)
        found.max_token = max(found.max_token, int(tokens.max(initial=0)))
        found.documents += int(np.count_nonzero(tokens == ends))
    found.shards = [replace(shard, sha256=digest.hexdigest())]
    return found


def cut_end(
    shards: Sequence[Shard], fraction: float, dtype: TokenDtype
) -> tuple[list[Shard], list[Shard]]:
    """Return shards without their last tokens, a `fraction` and at least one, and these."""
    total = sum(shard.tokens for shard in shards)
    left = total - max(1, int(total * fraction))
    first, last = [], []
    for shard in shards:
        at = min(left, shard.tokens)
        left -= at
        first.append(shard.part(0, at, dtype))
        last.append(shard.part(at, shard.tokens, dtype))
    return [each for each in first if each.tokens], [each for each in last if each.tokens]


def read_split(
    shards: Sequence[Shard],
    dtype: TokenDtype,
    folder: Path,
    tokenizer: Tokenizer,
    done: Callable[[int], object] = lambda tokens: None,
) -> Split:
    """Return the split that shards make, all of which are read; `done` is told of their tokens.

    Raises `OSError`, and `UserError` for a token that the tokenizer does not have.
    """
    split = Split()
    with ThreadPoolExecutor() as pool:  # hashing and counting release the interpreter lock
        read = pool.map(lambda each: read_shard(each, dtype, folder, tokenizer.end_of_text), shards)
        for each in read:
            if each.max_token >= tokenizer.vocab_size:
                raise UserError(
                    f"{each.shards[0].file} has token id {each.max_token}, beyond the "
                    f'{tokenizer.vocab_size} of data.tokenizer = "{tokenizer.name}": set the one '
                    "that they were made with"
                )
            split.add(each)
            done(each.tokens)
    return split
