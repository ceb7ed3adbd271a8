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
from pathlib import Path

import numpy as np

from torchmars.config import ResolvedData
from torchmars.config.source import parse_source
from torchmars.core.console import say
from torchmars.core.errors import UserError, file_errors
from torchmars.core.files import PARTIAL, open_file
from torchmars.core.words import counted
from torchmars.data.corpus import matching_files
from torchmars.data.manifest import (
    Shard,
    cut_end,
    make_manifest,
    numpy_dtype,
    read_split,
    write_manifest,
)
from torchmars.data.progress_bar import progress_bar
from torchmars.data.tokenizer import TokenDtype, load_tokenizer

# The last of these words in a file's name tells its split.
SPLIT_WORDS = re.compile(r"(?<![a-z])(train|val|test)(?:id|idation)?(?![a-z])")
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


def index(config: ResolvedData, folder: Path, shard_tokens: int) -> None:
    """Read the files that data.source names, and leave their manifest in `folder`.

    A large file is several shards of `shard_tokens` tokens, which ranks check side by side. Where
    there are no validation tokens, the end of the training tokens is that split. Raises
    `UserError`, naming the file, for one that violates its format.
    """
    read = READERS[parse_source(config.source).kind]
    files = find_files(config)
    found = [read(file) for split in files for file in split]
    dtype, tokenizer = found[0][1], load_tokenizer(config.tokenizer, config.begin_token)
    for shard, other in found:
        if other != dtype:
            raise UserError(
                f"{shard.file} has {other} tokens, {found[0][0].file} {dtype}: make them a "
                "data.mixture of two parts"
            )
    shards = [shard for shard, _ in found]
    train, validation = shards[: len(files[0])], shards[len(files[0]) :]
    if not validation:
        train, validation = cut_end(train, config.validation_fraction, dtype)
    splits = {}
    total = sum(shard.tokens for shard in shards)
    with progress_bar(f"reading {config.source}", total, "tokens") as bar:
        for name, whole in (("train", train), ("validation", validation)):
            parts = [
                each.part(begin, min(begin + shard_tokens, each.tokens), dtype)
                for each in whole
                for begin in range(0, each.tokens, shard_tokens)
            ]
            with file_errors(f"cannot read the tokens of {config.source}", "restore them"):
                splits[name] = read_split(parts, dtype, folder, tokenizer, bar.update)
    folder.mkdir(parents=True, exist_ok=True)
    if any(not file.name.endswith(PARTIAL) for file in folder.iterdir()):
        raise UserError(
            f"{folder} holds files but no manifest.json: set data.path to a new or empty folder"
        )
    write_manifest(folder, make_manifest(config, tokenizer, dtype, splits))


def find_files(config: ResolvedData) -> tuple[list[Path], list[Path]]:
    """Return the files of tokens to train on, and those that validate, sorted, as absolute paths.

    A file that is named outright is one to train on, whatever its name. Raises `UserError` if
    there are none to train on.
    """
    source = parse_source(config.source)
    held = {
        file
        for pattern in config.validation_files
        for file in token_files(pattern, source.kind, "data.validation_files")
    }
    is_folder = os.path.isdir(os.path.expanduser(source.glob))
    # There may be other files in a folder of nanoGPT's or llm.c's.
    unnamed = "test" if is_folder and source.kind != "megatron" else "train"
    splits: dict[str, list[Path]] = {"train": [], "val": [*held], "test": []}
    for file in token_files(source.glob, source.kind, "data.source"):
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


def token_files(pattern: str, kind: str, option: str) -> list[Path]:
    """Return the files of tokens that a path, a folder or a glob names. Raises `UserError`."""
    place = os.path.expanduser(pattern)
    if os.path.isdir(place):
        place = os.path.join(glob.escape(place), "*.bin")
    elif kind == "megatron":
        place = place.removesuffix(".idx").removesuffix(".bin") + ".bin"
    return [Path(os.path.abspath(file)) for file in matching_files(place, kind, option)]


def nanogpt_tokens(file: Path) -> Found:
    """Return the tokens of a file without a header."""
    size, start = read_start(file, 8)
    header = struct.unpack("<2i", start.ljust(8, b"\0"))
    if size % 2 or not size or header in LLMC_KINDS or start.startswith(b"\x93NUMPY"):
        raise UserError(
            f"{file} has {size} bytes and begins with {start!r}: nanoGPT's tokens are uint16 "
            "without a header; llmc: reads files of llm.c"
        )
    return Shard(str(file), size // 2), "uint16"


def llmc_tokens(file: Path) -> Found:
    """Return the tokens of a file with llm.c's header."""
    size, header = read_start(file, 12)
    magic, version, count = struct.unpack("<3i", header.ljust(12, b"\0"))
    dtype = LLMC_KINDS.get((magic, version))
    if dtype and count > 0 and size == LLMC_HEADER + count * numpy_dtype(dtype).itemsize:
        return Shard(str(file), count, offset=LLMC_HEADER), dtype
    known = " or ".join(f"{magic} and {version}" for magic, version in LLMC_KINDS)
    raise UserError(
        f"{file} has {size} bytes, and by its header magic number {magic}, version {version} and "
        f"{count} tokens: that is no whole file of llm.c's ({known}): copy it again, or make it "
        "again with today's llm.c"
    )


def megatron_tokens(file: Path) -> Found:
    """Return the tokens of a file that an index beside it describes."""
    index_file = file.with_suffix(".idx")
    size, _ = read_start(file, 0)
    _, header = read_start(index_file, MEGATRON_HEADER.size)
    magic, version, code, sequences, _ = MEGATRON_HEADER.unpack(
        header.ljust(MEGATRON_HEADER.size, b"\0")
    )
    with contextlib.suppress(KeyError, ValueError, OverflowError):  # it ends before what it says
        dtype = MEGATRON_KINDS[magic, version, code]
        content, width = np.memmap(index_file, mode="r"), numpy_dtype(dtype).itemsize
        # The length of each sequence in tokens, and its byte offset. What follows says which of
        # them are one document.
        lengths = np.frombuffer(content, "<i4", sequences, len(header))
        pointers = np.frombuffer(content, "<i8", sequences, len(header) + lengths.nbytes)
        ends = np.cumsum(lengths, dtype=np.int64) * width
        if size and [*ends[-1:]] == [size] and np.array_equal(pointers, [0, *ends[:-1]]):
            return Shard(str(file), size // width), dtype
    raise UserError(
        f"{index_file} (version {version}, dtype {code}) is no index of Megatron's of the uint16 "
        f"or int32 tokens in {file}, which has {size} bytes: copy both again, or make them again "
        "with preprocess_data.py"
    )


READERS: dict[str, Callable[[Path], Found]] = {
    "nanogpt": nanogpt_tokens,
    "llmc": llmc_tokens,
    "megatron": megatron_tokens,
}


def read_start(file: Path, count: int) -> tuple[int, bytes]:
    """Return the bytes of a regular file: how many, and the first `count`. Raises `UserError`."""
    with file_errors(f"cannot read {file}", "name files of tokens"), open_file(file) as stream:
        return os.fstat(stream.fileno()).st_size, stream.read(count)
