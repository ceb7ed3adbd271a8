"""Shards of documents that a test makes up, with any tokenizer."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from torchmars.config import DataConfig
from torchmars.data.manifest import (
    SPLITS,
    DataManifest,
    Shard,
    numpy_dtype,
    read_split,
    write_manifest,
)
from torchmars.data.tokenizer import Tokenizer, smallest_dtype


def write_shards(
    config: DataConfig,
    tokenizer: Tokenizer,
    documents: Iterable[str],
    folder: Path,
    shard_tokens: int = 100_000_000,
) -> DataManifest:
    """Write a folder of shards and return its manifest.

    The second of each three documents belongs to the validation split.
    """
    folder.mkdir(parents=True)
    dtype = smallest_dtype(tokenizer.vocab_size)
    encoded = [np.append(tokenizer.encode(text), tokenizer.end_of_text) for text in documents]
    splits = {}
    for split, name in enumerate(SPLITS):
        mine = [each for number, each in enumerate(encoded) if (number % 3 == 1) == split]
        tokens, shards = np.concatenate(mine).astype(numpy_dtype(dtype)), []
        for number, begin in enumerate(range(0, len(tokens), shard_tokens)):
            some = tokens[begin : begin + shard_tokens]
            shards.append(Shard(f"{name}-{number:05d}.bin", len(some)))
            some.tofile(folder / shards[-1].file)
        splits[name] = read_split(shards, dtype, folder, tokenizer)
    return write_manifest(folder, config, tokenizer, dtype, splits)
