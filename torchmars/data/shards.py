"""Whether shards match their manifest, and fit a run."""

import hashlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import numpy as np

from torchmars.core.errors import UserError
from torchmars.core.files import read_chunks
from torchmars.data.manifest import SPLITS, DataManifest, Shard, Split, TokenDtype, numpy_dtype

Level = Literal["full", "size", "off"]
REMEDY = "restore it, or remove the folder {} to prepare it again"


def check_shards(
    manifest: DataManifest, folder: Path, part: int = 0, parts: int = 1, level: Level = "full"
) -> None:
    """Raise `UserError` naming the first shard that is missing, truncated or altered.

    The level "full" reads every byte, "size" none. `parts` ranks can share the work: each takes the
    shards `part`, `part + parts`, ...
    """
    if level == "off":
        return
    shards = [(shard, split) for split in manifest.splits.values() for shard in split.shards]
    with ThreadPoolExecutor() as pool:  # hashing releases the interpreter lock
        checks = [
            pool.submit(check_shard, shard, split, manifest.dtype, folder, level)
            for shard, split in shards[part::parts]
        ]
        for check in checks:
            check.result()


def check_shard(
    shard: Shard, split: Split, dtype: TokenDtype, folder: Path, level: Level = "full"
) -> None:
    """Raise `UserError` if a shard of `split` is missing, truncated, altered or cannot be read.

    The level "full" reads every byte, and looks for tokens above the split's largest; "size" reads
    none.
    """
    path = folder / shard.file
    remedy = REMEDY.format(folder)
    end = shard.offset + shard.tokens * numpy_dtype(dtype).itemsize
    own = not os.path.isabs(shard.file)  # else other shards may follow in the same file
    try:
        if not path.is_file():
            raise UserError(f"the shard {path} is missing: {remedy}")
        size = path.stat().st_size
        if size < end or own and size > end:
            least = "" if own else " at least"
            raise UserError(
                f"the shard {path} has {size} bytes, its manifest says{least} {end}: {remedy}"
            )
        if level == "full":
            digest, largest = digest_and_largest(path, shard.offset, end, dtype)
            if digest != shard.sha256:
                raise UserError(
                    f"the shard {path} was altered (its SHA-256 is not the manifest's): {remedy}"
                )
            if largest > split.max_token:
                raise UserError(too_large(path, largest, split, folder))
    except OSError as error:
        raise UserError(f"the shard {path} cannot be read ({error.strerror}): {remedy}") from None


def too_large(path: Path | str, largest: int, split: Split, folder: Path) -> str:
    """Return the message on a shard with a token above its split's largest."""
    return (
        f"the shard {path} has token id {largest}, its manifest says that {split.max_token} is the "
        f"largest: {REMEDY.format(folder)}"
    )


def digest_and_largest(
    path: Path,
    begin: int,
    end: int,
    dtype: TokenDtype,
    look: Callable[[np.ndarray], None] = lambda tokens: None,
) -> tuple[str, int]:
    """Return the SHA-256 of bytes [begin, end) of a file, and the largest token in them.

    `look` gets all tokens, some at a time. Raises `OSError`.
    """
    digest, largest, kind = hashlib.sha256(), 0, numpy_dtype(dtype)
    for chunk in read_chunks(path, begin, end):
        digest.update(chunk)
        tokens = np.frombuffer(chunk, kind, len(chunk) // kind.itemsize)
        largest = max(largest, int(tokens.max(initial=0)))
        look(tokens)
    return digest.hexdigest(), largest


def check_vocabulary(manifest: DataManifest, rows: int, folder: Path) -> None:
    """Raise `UserError` if the shards hold a token id beyond a token table of `rows` rows."""
    largest = max(split.max_token for split in manifest.splits.values())
    if largest >= rows:
        raise UserError(
            f"{folder} has token id {largest}, beyond model.vocab_size = {rows}: "
            f"set model.vocab_size to at least {manifest.vocab_size}, or leave it out"
        )


def check_size(
    manifest: DataManifest, seq_len: int, samples: int, folder: Path, packed: bool
) -> None:
    """Raise `UserError` if a split is too small.

    The training split must have a window for each of the `samples` that it gives to a global batch,
    the validation split one window. `packed`: each shard has windows of its own.
    """
    found = []
    for split in (manifest.splits[name] for name in SPLITS):
        tokens = [shard.tokens for shard in split.shards] if packed else [split.tokens]
        found.append(sum(count_windows(count, seq_len) for count in tokens))
    train, validation = found
    if train < samples:
        raise UserError(
            f"the corpus in {folder} is too small: {manifest.splits['train'].tokens:,} tokens, and "
            f"a step needs {samples} x {seq_len} (its share of training.global_batch_size x "
            "training.seq_len): add text or lower one of the two"
        )
    if validation < 1:
        raise UserError(
            f"the validation split has {manifest.splits['validation'].tokens} tokens, less than "
            f"one window of training.seq_len = {seq_len}: prepare {folder} again with a higher "
            "data.validation_fraction"
        )


def count_windows(tokens: int, seq_len: int) -> int:
    """Return how many windows `tokens` tokens give.

    A window has `seq_len` inputs, each with the next token as its target.
    """
    return max(0, tokens - 1) // seq_len
