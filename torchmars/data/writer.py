"""Writes tokenised documents into shards."""

import hashlib
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import numpy as np

from torchmars.config import DataConfig
from torchmars.core.errors import UserError
from torchmars.core.files import PARTIAL, remove
from torchmars.data.manifest import (
    FORMAT,
    SPLITS,
    DataManifest,
    Shard,
    Split,
    numpy_dtype,
)
from torchmars.data.tokenizer import TokenDtype, Tokenizer, smallest_dtype

SHARD_TOKENS = 100_000_000


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
        config.source,
        config.files,
        {"train": train.close(), "validation": validation.close()},
        dtype,
        config.validation_fraction,
        tokenizer.sha256,
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
