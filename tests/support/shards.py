"""Shards of documents that a test makes up, with any tokenizer."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from torchmars.config import DataConfig
from torchmars.data.documents import Encoded
from torchmars.data.manifest import SPLITS, DataManifest, make_manifest, write_manifest
from torchmars.data.prepare import PieceWriter
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
    writer = PieceWriter(folder, 0, dtype, shard_tokens)
    for number, text in enumerate(documents):
        tokens = np.append(*tokenizer.encode_batch([text]), tokenizer.end_of_text).astype(dtype)
        split = SPLITS[number % 3 == 1]
        arrays = {name: tokens[: len(tokens) * (name == split)] for name in SPLITS}
        documents = {name: int(name == split) for name in SPLITS}
        encoded = Encoded(arrays, documents, dict.fromkeys(SPLITS, 0), [])
        writer.add(encoded)
    writer.close()
    manifest = make_manifest(config, tokenizer, dtype, writer.part.splits)
    write_manifest(folder, manifest)
    return manifest
