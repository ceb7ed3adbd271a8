"""Whether shards are what their manifest says, and fit a run."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from torchmars.core.errors import UserError
from torchmars.core.files import sha256
from torchmars.data.manifest import SPLITS, DataManifest, Shard, TokenDtype, numpy_dtype


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


def check_size(
    manifest: DataManifest, seq_len: int, global_batch_size: int, packed: bool = False
) -> None:
    """Raise `UserError` if a split is too small.

    The training split must have one global batch of windows, the validation split one window.
    `packed`: each shard has windows of its own.
    """
    splits = [manifest.splits[name] for name in SPLITS]
    train, validation = (
        sum(
            count_windows(tokens, seq_len)
            for tokens in ([shard.tokens for shard in split.shards] if packed else [split.tokens])
        )
        for split in splits
    )
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
