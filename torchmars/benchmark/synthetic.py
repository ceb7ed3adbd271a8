"""Shards of random tokens, for measurements that need no corpus."""

import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np

from torchmars.config import ResolvedData
from torchmars.data.manifest import Shard, Split, make_manifest, numpy_dtype, write_manifest
from torchmars.data.named_tokenizers import load_tokenizer
from torchmars.data.tokenizer import smallest_dtype

DOCUMENT = 1000  # tokens of a document, with the one that ends it
MOST_TOKENS = 20_000_000  # of a split; a run that needs more reads them again


def write_random_shards(data: ResolvedData, tokens: int, folder: Path) -> ResolvedData:
    """Write shards of `tokens` random tokens to `folder`; return the section that reads them.

    They are whole documents, and at most `MOST_TOKENS`. The vocabulary is the one of
    `data.tokenizer`, each token as likely as another. Raises `UserError` if there is no such
    tokenizer.
    """
    tokenizer = load_tokenizer(data.tokenizer, data.begin_token)
    dtype = smallest_dtype(tokenizer.vocab_size)
    documents = -(-min(tokens, MOST_TOKENS) // DOCUMENT)
    drawn = np.random.default_rng(0).integers(tokenizer.vocab_size, size=(documents, DOCUMENT))
    drawn[:, : len(tokenizer.before)] = tokenizer.before
    drawn[:, -1] = tokenizer.end_of_text
    content = drawn.astype(numpy_dtype(dtype)).tobytes()
    digest, largest = hashlib.sha256(content).hexdigest(), int(drawn.max())
    folder.mkdir()
    splits = {}
    for name in ("train", "validation"):
        file = f"{name}-00000-000.bin"
        (folder / file).write_bytes(content)
        shard = Shard(file, drawn.size, digest)
        splits[name] = Split(drawn.size, documents, largest, [shard])
    random = replace(data, source="stdlib", files=[], mixture=[], path=str(folder))
    write_manifest(folder, make_manifest(random, tokenizer, splits, dtype))
    return random
