"""Tokens that other programs have written, read where they lie.

Nothing is copied. Each file is read once: a manifest in data.path then names parts of the files as
its shards, so that checks, fingerprints, windows and resumes work as they do for our own.

- nanoGPT, `nanogpt:FOLDER`: train.bin and val.bin, uint16 without a header.
- llm.c and modded-nanogpt, `llmc:FOLDER`: *_train_*.bin and *_val_*.bin. They have a header of
  256 int32, of which the first three are a magic number, a version and the number of tokens; then
  the tokens (dev/data/data_common.py).
- Megatron, `megatron:PREFIX`: PREFIX.bin has the tokens without a header, PREFIX.idx says what they
  are (megatron/core/datasets/indexed_dataset.py).
"""

import contextlib
import glob
import os
import re
import struct
from collections.abc import Callable
from pathlib import Path, PurePath

import numpy as np

from torchmars.config import ResolvedData
from torchmars.config.source import parse_source
from torchmars.core.console import say
from torchmars.core.errors import UserError, file_errors
from torchmars.core.files import open_file
from torchmars.core.words import counted
from torchmars.data.corpus import matching_files
from torchmars.data.manifest import (
    SPLITS,
    Shard,
    cut_end,
    numpy_dtype,
    read_split,
    write_manifest,
)
from torchmars.data.progress_bar import progress_bar
from torchmars.data.tokenizer import TokenDtype, load_tokenizer

# The last of these words in a file's name tells its split.
SPLIT_WORDS = re.compile(r"(?<![a-z])(train|val|test)(?:id|idation)?(?![a-z])")
SHARD_TOKENS = 100_000_000
LLMC_HEADER = 256 * 4  # bytes
# By magic number and version.
LLMC_KINDS: dict[tuple[int, ...], TokenDtype] = {(20240520, 1): "uint16", (20240801, 7): "uint32"}
# Magic number, version, code of the dtype, sequences, and documents and 1.
MEGATRON_HEADER = struct.Struct("<9sQBQQ")
# By the first three of these. Code 4 is int32, of ids above 0.
MEGATRON_KINDS: dict[tuple[bytes, int, int], TokenDtype] = {
    (b"MMIDIDX\x00\x00", 1, 4): "uint32",
    (b"MMIDIDX\x00\x00", 1, 8): "uint16",
}
Found = tuple[Shard, TokenDtype]  # the tokens of a file


def index(config: ResolvedData, folder: Path) -> None:
    """Read the files that data.source names, and leave their manifest in `folder`.

    A large file is several shards of `SHARD_TOKENS` tokens, which ranks check side by side. Where
    there are no validation tokens, the end of the training tokens is that split. Raises
    `UserError`, naming the file, for one that violates its format.
    """
    kind = parse_source(config.source).kind
    train, validation = ([read_file(file, kind) for file in files] for files in find_files(config))
    first, dtype = train[0]
    for shard, other in (*train, *validation):
        if other != dtype:
            raise UserError(
                f"{shard.file} has {other} tokens, {first.file} {dtype}: make them a data.mixture "
                "of two parts"
            )
    shards = [shard for shard, _ in train], [shard for shard, _ in validation]
    total = sum(shard.tokens for split in shards for shard in split)
    if not validation:
        shards = cut_end(shards[0], config.validation_fraction, dtype)
    tokenizer, splits = load_tokenizer(config.tokenizer, config.begin_token), {}
    told = file_errors(f"cannot read the tokens of {config.source}", "restore them")
    with told, progress_bar(f"reading {config.source}", total, "tokens") as bar:
        for name, whole in zip(SPLITS, shards):
            parts = [
                each.part(begin, min(begin + SHARD_TOKENS, each.tokens), dtype)
                for each in whole
                for begin in range(0, each.tokens, SHARD_TOKENS)
            ]
            splits[name] = read_split(parts, dtype, folder, tokenizer, bar.update)
    os.makedirs(os.path.realpath(folder), exist_ok=True)  # a link may lead to none yet
    write_manifest(folder, config, tokenizer, dtype, splits)


def find_files(config: ResolvedData) -> tuple[list[Path], list[Path]]:
    """Return the files of tokens to train on, and those that validate, sorted, as absolute paths.

    A file that is named outright is one to train on, whatever its name. Raises `UserError` if
    there are none to train on.
    """
    source = parse_source(config.source)
    held = {*token_files(config.validation_files, source.kind, "data.validation_files")}
    is_folder = os.path.isdir(os.path.expanduser(source.glob))
    # There may be other files in a folder of nanoGPT's or llm.c's.
    unnamed = "test" if is_folder and source.kind != "megatron" else "train"
    splits: dict[str, list[Path]] = {"train": [], "val": [*held], "test": []}
    for file in token_files([source.glob], source.kind, "data.source"):
        several = is_folder or glob.has_magic(source.glob)
        words = SPLIT_WORDS.findall(file.name.lower()) if several else ["train"]
        if file not in held:
            splits[(words or [unnamed])[-1]].append(file)
    if others := splits["test"]:
        say(
            f"left out {counted(len(others), 'file')} whose names say neither train nor val (the "
            f"first: {others[0]}): name those to read outright or in data.validation_files"
        )
    if not splits["train"]:
        raise UserError(
            f'data.source = "{config.source}" finds no tokens to train on: name other files'
        )
    return splits["train"], sorted(splits["val"])


def token_files(patterns: list[str], kind: str, option: str) -> list[Path]:
    """Return the files of tokens that paths, folders and globs name. Raises `UserError`."""
    found: set[PurePath] = set()
    for pattern in patterns:
        place = os.path.expanduser(pattern)
        if os.path.isdir(place):
            place = os.path.join(glob.escape(place), "*.bin")
        elif kind == "megatron":
            place = place.removesuffix(".idx").removesuffix(".bin") + ".bin"
        found.update(matching_files(place, kind, option))
    return sorted(Path(os.path.abspath(file)) for file in found)


def read_file(file: Path, kind: str) -> Found:
    """Return the tokens of a file. Raises `UserError` for one that is not of its kind."""
    with file_errors(f"cannot read {file}", "name files of tokens"), open_file(file) as stream:
        size, start = os.fstat(stream.fileno()).st_size, stream.read(12)
    if found := READERS[kind](file, size, start.ljust(12, b"\0")):
        return found
    raise UserError(
        f"{file}, of {size} bytes that begin with {start!r}, is no whole file of {kind} tokens of "
        "16 or 32 bits: copy it again (for megatron with its .idx), make it again with today's "
        "version of that program, or name its kind in data.source"
    )


def nanogpt_tokens(file: Path, size: int, start: bytes) -> Found | None:
    """Return the tokens of a file without a header."""
    of_others = struct.unpack("<2i", start[:8]) in LLMC_KINDS or start.startswith(b"\x93NUMPY")
    return None if size % 2 or not size or of_others else (Shard(str(file), size // 2), "uint16")


def llmc_tokens(file: Path, size: int, start: bytes) -> Found | None:
    """Return the tokens of a file with llm.c's header."""
    magic, version, count = struct.unpack("<3i", start)
    dtype = LLMC_KINDS.get((magic, version))
    if dtype and count > 0 and size == LLMC_HEADER + count * numpy_dtype(dtype).itemsize:
        return Shard(str(file), count, offset=LLMC_HEADER), dtype
    return None


def megatron_tokens(file: Path, size: int, start: bytes) -> Found | None:
    """Return the tokens of a file that an index beside it describes."""
    begin, index_file = MEGATRON_HEADER.size, file.with_suffix(".idx")
    # A ValueError or struct.error: it ends before what it says.
    with contextlib.suppress(KeyError, ValueError, OverflowError, struct.error):
        told = file_errors(f"cannot read {index_file}", "name files of tokens")
        with told, open_file(index_file) as stream:
            content = np.memmap(stream, mode="r")
        magic, version, code, sequences, _ = MEGATRON_HEADER.unpack(content[:begin].tobytes())
        dtype = MEGATRON_KINDS[magic, version, code]
        width = numpy_dtype(dtype).itemsize
        # The length of each sequence in tokens, and its byte offset. What follows says which of
        # them are one document.
        lengths = np.frombuffer(content, "<i4", sequences, begin)
        pointers = np.frombuffer(content, "<i8", sequences, begin + lengths.nbytes)
        ends = np.cumsum(lengths, dtype=np.int64) * width
        if size and [*ends[-1:]] == [size] and np.array_equal(pointers, [0, *ends[:-1]]):
            return Shard(str(file), size // width), dtype
    return None


# By the kind of a source: from a file, its bytes and the first 12 of them to its tokens; None where
# it is not of that kind.
READERS: dict[str, Callable[[Path, int, bytes], Found | None]] = {
    "nanogpt": nanogpt_tokens,
    "llmc": llmc_tokens,
    "megatron": megatron_tokens,
}
