"""The on-disk format: shards of tokens beside a JSON manifest that says what they hold.

A folder has `manifest.json`, `sources.json` (see sources.py) and, for each split, files
`train-00000.bin`, `validation-00000.bin` of little-endian tokens without a header, uint16 or
uint32 as the manifest says. The manifest is written last of those that a run needs, so a folder
without one is unfinished.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import numpy as np

from torchmars.config import DataConfig
from torchmars.core.bounds import Name, Range
from torchmars.core.errors import UserError
from torchmars.core.files import PARTIAL, remove, sha256
from torchmars.core.formats import Format
from torchmars.data.tokenizer import Tokenizer, VocabularySize

# Version 1 did not know its validation_fraction.
FORMAT = Format(
    "torchmars-shards",
    written=3,
    oldest=1,
    checksum_since=3,
    remedy="use the version of torchmars that wrote it, or set data.path to a new folder",
    added={2: {"dtype": "uint16"}},
)
TokenDtype = Literal["uint16", "uint32"]
LARGEST_TOKEN = {"uint16": 2**16 - 1, "uint32": 2**32 - 1}
SPLITS = ("train", "validation")
SHARD_TOKENS = 100_000_000
Tokens = Annotated[int, Range(0, 10**15)]


@dataclass
class Shard:
    """One file: its name, number of tokens and SHA-256."""

    file: Annotated[str, Name("file")]
    tokens: Annotated[int, Range(1, 10**15)]
    sha256: str


@dataclass
class Split:
    """The shards of one split, in order, and what they hold."""

    tokens: Tokens = 0
    documents: Tokens = 0
    max_token: Annotated[int, Range(0, 2**32 - 1)] = 0
    shards: list[Shard] = field(default_factory=list)


@dataclass
class DataManifest:
    """What a folder of shards holds and what it was made from."""

    tokenizer: str
    vocab_size: VocabularySize
    corpus: str
    files: list[str]
    splits: dict[str, Split]
    dtype: TokenDtype
    """What the shards' tokens are."""
    validation_fraction: float | None = None

    def fingerprint(self) -> str:
        """Return a hash of the training tokens and their order."""
        return hashlib.sha256(
            "".join(shard.sha256 for shard in self.splits["train"].shards).encode()
        ).hexdigest()


def smallest_dtype(vocab_size: int) -> TokenDtype:
    """Return the dtype of shards of a vocabulary."""
    return "uint16" if vocab_size <= 2**16 else "uint32"


def numpy_dtype(dtype: TokenDtype) -> np.dtype:
    """Return how the tokens of shards lie on the disk."""
    return np.dtype(dtype).newbyteorder("<")


class ShardWriter:
    """Writes the documents of one split into shards; `close` returns the split."""

    def __init__(
        self, folder: Path, name: str, dtype: TokenDtype, shard_tokens: int = SHARD_TOKENS
    ) -> None:
        self.folder, self.name, self.shard_tokens = folder, name, shard_tokens
        self.dtype = numpy_dtype(dtype)
        self.split = Split()
        self.tokens = 0
        self._buffer: list[np.ndarray] = []
        self._buffered = 0

    def add(self, tokens: np.ndarray) -> None:
        """Append one document, its end-of-text token included."""
        self.split.documents += 1
        self.split.max_token = max(self.split.max_token, int(tokens.max()))
        self.tokens += len(tokens)
        self._buffer.append(tokens)
        self._buffered += len(tokens)
        while self._buffered >= self.shard_tokens:
            self._write(self.shard_tokens)

    def close(self) -> Split:
        if self._buffered:
            self._write(self._buffered)
        return self.split

    def _write(self, count: int) -> None:
        tokens = np.concatenate(self._buffer)
        data = tokens[:count].astype(self.dtype).tobytes()
        file = f"{self.name}-{len(self.split.shards):05d}.bin"
        (self.folder / file).write_bytes(data)
        self.split.shards.append(Shard(file, count, hashlib.sha256(data).hexdigest()))
        self.split.tokens += count
        self._buffer, self._buffered = [tokens[count:]], len(tokens) - count


def write_shards(
    config: DataConfig,
    tokenizer: Tokenizer,
    documents: Iterator[str],
    folder: Path,
    shard_tokens: int = SHARD_TOKENS,
) -> DataManifest:
    """Tokenise `documents` into `folder`, which appears only once it is complete.

    Returns the manifest. Raises `UserError` for a corpus without text and for a `folder` that holds
    other files.
    """
    folder = folder.resolve()
    if folder.exists() and any(folder.iterdir()):
        raise UserError(
            f"{folder} holds files but no manifest.json: set data.path to a new or empty folder"
        )
    partial = folder.with_name(folder.name + PARTIAL)
    if os.path.lexists(partial):
        remove(partial)
    partial.mkdir(parents=True)
    dtype = smallest_dtype(tokenizer.vocab_size)
    train, validation = (ShardWriter(partial, name, dtype, shard_tokens) for name in SPLITS)
    split_documents(_tokenised(tokenizer, documents), train, validation, config.validation_fraction)
    if not train.tokens:
        raise UserError("the corpus has no text: check data.files")

    manifest = DataManifest(
        tokenizer.name,
        tokenizer.vocab_size,
        config.corpus,
        config.files,
        {"train": train.close(), "validation": validation.close()},
        dtype,
        config.validation_fraction,
    )
    (partial / "manifest.json").write_text(FORMAT.text(asdict(manifest)))
    if folder.exists():
        folder.rmdir()
    partial.rename(folder)
    return manifest


def split_documents(
    documents: Iterator[np.ndarray], train: ShardWriter, validation: ShardWriter, fraction: float
) -> None:
    """Write each of the tokenised `documents` to one of two splits.

    A document goes to validation whenever its share of the tokens has fallen below `fraction`. A
    corpus of a single document is cut near its end instead.
    """
    first: np.ndarray | None = next(documents, None)
    if first is None:
        return
    for tokens in documents:
        if first is not None:  # there is a second one, so it need not be cut
            train.add(first)
            first = None
        share = validation.tokens / (train.tokens + validation.tokens)
        (validation if share < fraction else train).add(tokens)
    if first is not None:
        cut = len(first) - max(1, int(len(first) * fraction))
        train.add(first[:cut])
        validation.add(first[cut:])


def _tokenised(
    tokenizer: Tokenizer, documents: Iterator[str], batch_characters: int = 4_000_000
) -> Iterator[np.ndarray]:
    """Yield each non-empty document's tokens with end-of-text. Batches are for speed."""
    end = np.array([tokenizer.end_of_text], dtype=smallest_dtype(tokenizer.vocab_size))
    batch: list[str] = []
    size = 0
    for document in documents:
        if not document.strip():
            continue
        batch.append(document)
        size += len(document)
        if size >= batch_characters:
            yield from (np.concatenate([tokens, end]) for tokens in tokenizer.encode_batch(batch))
            batch, size = [], 0
    yield from (np.concatenate([tokens, end]) for tokens in tokenizer.encode_batch(batch))


def read_manifest(folder: Path) -> DataManifest:
    """Return the manifest of `folder`.

    Raises `UserError` if it is damaged, and `OtherVersion` where another version wrote it in a
    way that this one cannot read.
    """
    path = folder / "manifest.json"
    try:
        manifest = FORMAT.read(path, DataManifest)
        check_splits(manifest)
        return manifest
    except OSError as error:
        raise UserError(
            f"cannot read {path}: {error.strerror}: prepare it with python -m torchmars.prepare"
        ) from None
    except ValueError as error:
        raise UserError(
            f"{path} is no manifest of this version ({error}): "
            f"remove the folder {folder} and prepare it anew"
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
        if split.max_token > LARGEST_TOKEN[manifest.dtype]:
            raise ValueError(f"a token id does not fit {manifest.dtype}")


def check_manifest(manifest: DataManifest, config: DataConfig, folder: Path) -> None:
    """Raise `UserError` if `folder` was made from something else than the config asks for."""
    for key in ("tokenizer", "corpus", "files", "validation_fraction"):
        found, wanted = getattr(manifest, key), getattr(config, key)
        unknown = key == "files" and not wanted or key == "validation_fraction" and found is None
        if found != wanted and not unknown:
            raise UserError(
                f"{folder} was prepared with data.{key} = {json.dumps(found)}, "
                f"the config says {json.dumps(wanted)}: set it back, set data.path to another "
                "folder, or remove this one to prepare it anew"
            )


def check_shards(manifest: DataManifest, folder: Path, part: int = 0, parts: int = 1) -> None:
    """Raise `UserError` naming the first shard that is missing, truncated or altered.

    Reads every byte. `parts` ranks can share the work: each takes the shards `part`,
    `part + parts`, ...
    """
    shards = [shard for split in manifest.splits.values() for shard in split.shards][part::parts]
    with ThreadPoolExecutor() as pool:  # hashing releases the interpreter lock
        list(pool.map(lambda shard: check_shard(shard, manifest.dtype, folder), shards))


def check_shard(shard: Shard, dtype: TokenDtype, folder: Path) -> None:
    """Raise `UserError` if a shard is missing, truncated, altered or cannot be read.

    Reads every byte.
    """
    path = folder / shard.file
    remedy = f"restore it, or remove the folder {folder} to prepare it anew"
    try:
        if not path.is_file():
            raise UserError(f"the shard {path} is missing: {remedy}")
        size, expected = path.stat().st_size, shard.tokens * numpy_dtype(dtype).itemsize
        if size != expected:
            raise UserError(
                f"the shard {path} has {size} bytes, its manifest says {expected}: {remedy}"
            )
        if sha256(path) != shard.sha256:
            raise UserError(
                f"the shard {path} was altered (its SHA-256 is not the manifest's): {remedy}"
            )
    except OSError as error:
        raise UserError(f"the shard {path} cannot be read ({error.strerror}): {remedy}") from None


def check_vocabulary(manifest: DataManifest, rows: int, folder: Path) -> None:
    """Raise `UserError` if the shards hold a token id beyond a token table of `rows` rows."""
    largest = max(split.max_token for split in manifest.splits.values())
    if largest >= rows:
        raise UserError(
            f"{folder} has token id {largest}, beyond model.vocab_size = {rows}: "
            f"set model.vocab_size to at least {manifest.vocab_size}, or leave it out"
        )


def check_size(manifest: DataManifest, seq_len: int, global_batch_size: int) -> None:
    """Raise `UserError` if a split is too small.

    The training split must have one global batch of windows, the validation split one window.
    """
    train, validation = (count_windows(manifest.splits[name].tokens, seq_len) for name in SPLITS)
    if train < global_batch_size:
        raise UserError(
            f"the corpus is too small for one global batch: {train} windows of "
            f"training.seq_len = {seq_len} tokens, training.global_batch_size = "
            f"{global_batch_size}: lower one of the two or add text"
        )
    if validation < 1:
        raise UserError(
            f"the validation split has {manifest.splits['validation'].tokens} tokens, less than "
            f"one window of training.seq_len = {seq_len}: prepare it anew with a higher "
            "data.validation_fraction"
        )


def count_windows(tokens: int, seq_len: int) -> int:
    """Return how many windows `tokens` tokens give.

    A window has `seq_len` inputs, each with the next token as its target.
    """
    return max(0, tokens - 1) // seq_len
