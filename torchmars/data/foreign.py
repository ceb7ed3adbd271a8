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
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from torchmars.config import ResolvedData
from torchmars.config.source import parse_source, reader_of
from torchmars.core.console import say
from torchmars.core.errors import UserError, file_errors
from torchmars.core.files import PARTIAL, open_file
from torchmars.core.words import counted
from torchmars.data.manifest import Shard, Split, make_manifest, numpy_dtype, write_manifest
from torchmars.data.progress_bar import ProgressBar
from torchmars.data.shards import digest_and_largest
from torchmars.data.tokenizer import TokenDtype, Tokenizer, load_tokenizer

# The last of these words in a file's name tells its split.
SPLIT_WORDS = re.compile(r"(?<![a-z])(train|val|valid|validation|test)(?![a-z])")
NUMPY_MAGIC = b"\x93NUMPY"
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


@dataclass(frozen=True)
class ForeignTokens:
    """Consecutive tokens of one file."""

    file: Path
    offset: int
    """Bytes before the first one."""
    count: int
    dtype: TokenDtype

    @property
    def end(self) -> int:
        """Bytes of the file up to the end of the last one."""
        return self.offset + self.count * numpy_dtype(self.dtype).itemsize

    def part(self, begin: int, end: int) -> "ForeignTokens":
        """Return tokens [begin, end) of these."""
        return replace(self, offset=replace(self, count=begin).end, count=end - begin)

    def parts(self, size: int) -> "Iterator[ForeignTokens]":
        """Yield all of these, at most `size` at a time."""
        for begin in range(0, self.count, size):
            yield self.part(begin, min(begin + size, self.count))


def index(config: ResolvedData, folder: Path, shard_tokens: int) -> None:
    """Read the files that data.source names, and leave their manifest in `folder`.

    A large file is several shards of `shard_tokens` tokens, which ranks check side by side. Where
    there are no validation tokens, the end of the training tokens is that split. Raises
    `UserError`, naming the file, for one that violates its format.
    """
    read = reader_of(READERS, parse_source(config.source).kind)
    train, validation = ([read(file) for file in files] for files in find_files(config))
    found = train + validation
    tokenizer = load_tokenizer(config.tokenizer, config.begin_token)
    for each in found:
        if each.dtype != found[0].dtype:
            raise UserError(
                f"{each.file} has {each.dtype} tokens, {found[0].file} {found[0].dtype}: "
                "make them a data.mixture of two parts"
            )
        if each.dtype == "uint16" and tokenizer.vocab_size > 2**16:
            raise UserError(
                f'{each.file} has uint16 tokens, and data.tokenizer = "{tokenizer.name}" has '
                f"{tokenizer.vocab_size:,}: set the tokenizer that the tokens were made with"
            )
    if not validation:
        train, validation = cut(train, config.validation_fraction)
    if not train:
        raise UserError(f"{found[0].file} has one token, all there is: add training tokens")
    splits = {"train": Split(), "validation": Split()}
    total = sum(each.count for each in found)
    with ProgressBar(f"reading {config.source}", total, 0, "tokens") as bar:
        for split, tokens in zip(splits.values(), (train, validation)):
            parts = [part for each in tokens for part in each.parts(shard_tokens)]
            with ThreadPoolExecutor() as pool:  # hashing and counting release the interpreter lock
                for shard, largest, documents in pool.map(partial(scan, tokenizer), parts):
                    split.shards.append(shard)
                    split.tokens += shard.tokens
                    split.documents += documents
                    split.max_token = max(split.max_token, largest)
                    bar.add(shard.tokens)
    with file_errors(f"cannot write to {folder}", "set data.path to a folder you can write"):
        folder.mkdir(parents=True, exist_ok=True)
        if any(not file.name.endswith(PARTIAL) for file in folder.iterdir()):
            raise UserError(
                f"{folder} holds files but no manifest.json: set data.path to a new or empty folder"
            )
        write_manifest(folder, make_manifest(config, tokenizer, splits, found[0].dtype))


def find_files(config: ResolvedData) -> tuple[list[Path], list[Path]]:
    """Return the files of tokens to train on, and those that validate, sorted, as absolute paths.

    A file that is named outright is one to train on, whatever its name. Raises `UserError` if
    there are none to train on.
    """
    source = parse_source(config.source)
    patterns = [(each, "data.validation_files") for each in config.validation_files]
    named = {file for each, option in patterns for file in token_files(each, source.kind, option)}
    splits: dict[str, list[Path]] = {"train": [], "validation": [*named], "test": []}
    place = os.path.expanduser(source.glob)
    is_folder = os.path.isdir(place)
    above = place if is_folder else os.path.dirname(re.split(r"[*?[]", place)[0])
    # There may be other files in a folder of nanoGPT's or llm.c's.
    split = "test" if is_folder and source.kind != "megatron" else "train"
    for file in token_files(source.glob, source.kind, "data.source"):
        words = SPLIT_WORDS.findall(os.path.relpath(file, above or ".").lower())
        told = words[-1:] if is_folder or glob.has_magic(place) else []
        if file not in named:
            splits["validation" if told and told[0][0] == "v" else (*told, split)[0]].append(file)
    if others := splits["test"]:
        say(
            f"left out {counted(len(others), 'file')} whose names say neither train nor val (the "
            f"first: {others[0]}): name those to read outright or in data.validation_files"
        )
    if not splits["train"]:
        raise UserError(
            f'data.source = "{config.source}" finds no tokens to train on: name other files of '
            "tokens"
        )
    return splits["train"], sorted(splits["validation"])


def token_files(pattern: str, kind: str, option: str) -> list[Path]:
    """Return the files of tokens that a path, a folder or a glob names. Raises `UserError`."""
    place = os.path.expanduser(pattern)
    if os.path.isdir(place):
        place = os.path.join(glob.escape(place), "*.bin")
    elif kind == "megatron":
        place = place.removesuffix(".idx").removesuffix(".bin") + ".bin"
    found = [place] if os.path.lexists(place) else glob.glob(place, recursive=True)
    if not found:
        raise UserError(
            f"{option}: {pattern!r} names no file of tokens: paths count from {os.getcwd()}"
        )
    return sorted(Path(os.path.abspath(file)) for file in found)


def nanogpt_tokens(file: Path) -> ForeignTokens:
    """Return the tokens of a file without a header."""
    size, start = read_start(file, 8)
    of_llmc = struct.unpack("<2i", start.ljust(8, b"\0")) in LLMC_KINDS
    if of_llmc or start.startswith(NUMPY_MAGIC):
        name = "llm.c's, which llmc: reads" if of_llmc else "that of NumPy's .npy"
        raise UserError(f"{file} has a header, {name}: nanoGPT's tokens are uint16 without one")
    if size % 2 or not size:
        raise UserError(f"{file} has {size} bytes, which are no uint16 tokens: copy it again")
    return ForeignTokens(file, 0, size // 2, "uint16")


def llmc_tokens(file: Path) -> ForeignTokens:
    """Return the tokens of a file with llm.c's header."""
    size, header = read_start(file, 12)
    magic, version, count = struct.unpack("<3i", header.ljust(12, b"\0"))
    tokens = ForeignTokens(file, LLMC_HEADER, count, LLMC_KINDS.get((magic, version), "uint16"))
    if (magic, version) not in LLMC_KINDS or size != tokens.end or count < 1:
        known = " or ".join(f"{magic} and {version}" for magic, version in LLMC_KINDS)
        raise UserError(
            f"{file} has {size} bytes, and by its header magic number {magic}, version {version} "
            f"and {count} tokens: that is no whole file of llm.c's ({known}): copy it again, or "
            "make it again with today's llm.c"
        )
    return tokens


def megatron_tokens(file: Path) -> ForeignTokens:
    """Return the tokens of a file that an index beside it describes."""
    index_file = file.with_suffix(".idx")
    size, _ = read_start(file, 0)
    _, header = read_start(index_file, MEGATRON_HEADER.size)
    entries = MEGATRON_HEADER.unpack(header.ljust(MEGATRON_HEADER.size, b"\0"))
    magic, version, code, sequences, _ = entries
    with contextlib.suppress(KeyError, ValueError, OverflowError):  # it ends before what it says
        dtype = MEGATRON_KINDS[magic, version, code]
        content = np.memmap(index_file, mode="r")
        # The length of each sequence in tokens, and its byte offset. What follows says which of
        # them are one document.
        lengths = np.frombuffer(content, "<i4", sequences, len(header))
        pointers = np.frombuffer(content, "<i8", sequences, len(header) + lengths.nbytes)
        ends = np.cumsum(lengths, dtype=np.int64) * numpy_dtype(dtype).itemsize
        begins = np.concatenate([[0], ends[:-1]])
        if size and [*ends[-1:]] == [size] and np.array_equal(pointers, begins):
            return ForeignTokens(file, 0, size // numpy_dtype(dtype).itemsize, dtype)
    raise UserError(
        f"{index_file} (version {version}, dtype {code}) is no index of Megatron's of the uint16 "
        f"or int32 tokens in {file}, which has {size} bytes: copy both again, or make them again "
        "with preprocess_data.py"
    )


READERS: dict[str, Callable[[Path], ForeignTokens]] = {
    "nanogpt": nanogpt_tokens,
    "llmc": llmc_tokens,
    "megatron": megatron_tokens,
}


def cut(
    found: list[ForeignTokens], fraction: float
) -> tuple[list[ForeignTokens], list[ForeignTokens]]:
    """Return all tokens but the last of them, a `fraction` of all, and these last."""
    total = sum(each.count for each in found)
    left = total - max(1, int(total * fraction))
    first, last = [], []
    for each in found:
        at = min(max(left, 0), each.count)
        first.append(each.part(0, at))
        last.append(each.part(at, each.count))
        left -= each.count
    return [each for each in first if each.count], [each for each in last if each.count]


def scan(tokenizer: Tokenizer, part: ForeignTokens) -> tuple[Shard, int, int]:
    """Return tokens as a shard, the largest of them and how many end documents: all are read.

    Raises `UserError` for a token that the tokenizer does not have, and for a document that begins
    with another one than it says.
    """
    end, begin = tokenizer.end_of_text, tokenizer.begin_token
    documents = 0

    def look(tokens: np.ndarray) -> None:
        nonlocal documents
        documents += int(np.count_nonzero(tokens == end))
        if begin is not None and (tokens[1:][tokens[:-1] == end] != begin).any():
            raise UserError(
                f"{part.file} has documents that do not begin with token {begin}, as "
                "data.begin_token says: set it to none, or to the token that they begin with"
            )

    with file_errors(f"cannot read {part.file}", "restore it"):
        digest, largest = digest_and_largest(part.file, part.offset, part.end, part.dtype, look)
    if largest >= tokenizer.vocab_size:
        raise UserError(
            f"{part.file} has token id {largest}, beyond the {tokenizer.vocab_size} of "
            f'data.tokenizer = "{tokenizer.name}": set the one that the tokens were made with'
        )
    return Shard(str(part.file), part.count, digest, part.offset), largest, documents


def read_start(file: Path, count: int) -> tuple[int, bytes]:
    """Return the bytes of a regular file: how many, and the first `count`. Raises `UserError`."""
    with file_errors(f"cannot read {file}", "name files of tokens"), open_file(file) as stream:
        return os.fstat(stream.fileno()).st_size, stream.read(count)
