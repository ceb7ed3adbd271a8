"""Tokens that other programs have written, read where they lie.

Nothing is copied. Each file is read once: a manifest in data.path then names parts of the files as
its shards, so that checks, fingerprints, windows and resumes work as they do for our own.

- nanoGPT, `nanogpt:FOLDER`: train.bin and val.bin, uint16 without a header.
- llm.c and modded-nanogpt, `llmc:FOLDER`: *_train_*.bin and *_val_*.bin. They have a header of
  256 int32, of which the first three are a magic number, a version and the number of tokens; then
  the tokens (dev/data/data_common.py).
- Megatron, `megatron:PREFIX`: PREFIX.bin has the tokens without a header, PREFIX.idx says what they
  are (megatron/core/datasets/indexed_dataset.py).

Both may be globs of files, and PREFIX a folder. Names tell the split (`SPLIT_WORDS`). Test tokens
are left out. Where there are no validation tokens, the end of the training tokens is that split.
"""

import contextlib
import os
import re
import struct
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from torchmars.config import ResolvedData
from torchmars.config.source import parse_source, reader_of
from torchmars.core.console import say, say_if_long
from torchmars.core.errors import UserError, file_errors
from torchmars.core.files import PARTIAL, path_problem, read_chunks
from torchmars.core.words import counted
from torchmars.data.files import FoundFiles, below, fixed_parts, looking, other_path
from torchmars.data.headerless import LLMC_KINDS, LOOKED_AT, check_made_with, check_numbers
from torchmars.data.manifest import Shard, Split, make_manifest, numpy_dtype, write_manifest
from torchmars.data.progress_bar import ProgressBar
from torchmars.data.shards import digest_and_largest
from torchmars.data.tokenizer import TokenDtype, Tokenizer, load_tokenizer

# The words of names that say which split a file is of, as in Hugging Face's data sets.
SPLIT_WORDS = {
    **dict.fromkeys(("train", "training", "trainset"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "valset", "dev", "devset"), "validation"),
    **dict.fromkeys(("test", "tests", "testing", "testset", "eval", "evals"), "test"),
    **dict.fromkeys(("evaluation", "holdout", "heldout"), "test"),
}
# The files that a folder of a program has, and what writes them.
MAKERS = {
    "nanogpt": ("train.bin and val.bin", "nanoGPT's prepare.py"),
    "llmc": ("*_train_*.bin and *_val_*.bin", "a data script of llm.c or modded-nanogpt"),
}
LLMC_HEADER = 256 * 4  # bytes
MEGATRON_MAGIC = b"MMIDIDX\x00\x00"
# Of Megatron's indices: magic number, version, code of the dtype, sequences, documents and 1.
MEGATRON_HEADER = struct.Struct("<9sQBQQ")
MEGATRON_DTYPES: dict[int, TokenDtype] = {4: "uint32", 8: "uint16"}  # 4 is int32, of ids above 0
MEGATRON_OTHERS = {1: "uint8", 2: "int8", 3: "int16", 5: "int64", 6: "float64", 7: "float32"}


@dataclass(frozen=True)
class ForeignTokens:
    """Consecutive tokens of one file."""

    file: Path
    offset: int
    """Bytes before the first one."""
    count: int
    dtype: TokenDtype
    ends: np.ndarray | None = None
    """How many tokens of the file each document ends after; None: end-of-text tokens tell."""

    @property
    def itemsize(self) -> int:
        """Bytes of a token."""
        return numpy_dtype(self.dtype).itemsize

    @property
    def end(self) -> int:
        """Bytes of the file up to the end of the last one."""
        return self.offset + self.count * self.itemsize

    def part(self, begin: int, end: int) -> "ForeignTokens":
        """Return tokens [begin, end) of these."""
        return replace(self, offset=self.offset + begin * self.itemsize, count=end - begin)


def index(config: ResolvedData, folder: Path, shard_tokens: int) -> None:
    """Read the files that data.source names, and leave their manifest in `folder`.

    A large file is several shards of `shard_tokens` tokens, which ranks check side by side.
    Raises `UserError`, naming the file, for one that violates its format.
    """
    source = parse_source(config.source)
    files = find_files(config.source, source.kind, source.glob)
    if files["test"]:
        say(
            f"left out {counted(len(files['test']), 'file')} of test tokens (the first: "
            f"{files['test'][0]}): name one outright to train on it"
        )
    read = reader_of(READERS, source.kind)
    train, validation = ([read(file) for file in files[split]] for split in ("train", "validation"))
    found = train + validation
    for each in found:
        if each.dtype != found[0].dtype:
            raise UserError(
                f"{each.file} has {each.dtype} tokens, {found[0].file} {found[0].dtype}: "
                "make them a data.mixture of two parts"
            )
    if not train:
        where = next(file.parent for split in files.values() for file in split)
        kinds = " and ".join(name for name, split in files.items() if split)
        raise UserError(f"{where} has {kinds} tokens only: add training tokens")
    tokenizer = load_tokenizer(config.tokenizer, config.begin_token)
    for each in found:
        if source.kind == "nanogpt":
            check_made_with(each.file, read_start(each.file, LOOKED_AT)[1], tokenizer)
        elif each.dtype == "uint16" and tokenizer.vocab_size > 2**16:
            raise UserError(
                f'{each.file} has uint16 tokens, and data.tokenizer = "{tokenizer.name}" has '
                f"{tokenizer.vocab_size:,}: set the tokenizer that the tokens were made with"
            )
    if not validation:
        train, validation = cut(train, config.validation_fraction)
    if not train:
        raise UserError(f"{found[0].file} has one token, all there is: add training tokens")
    total = sum(each.count for each in train + validation)
    with ProgressBar(f"reading {config.source}", total, 0, "tokens") as progress:
        splits = {
            name: scan(tokens, tokenizer, shard_tokens, progress.add)
            for name, tokens in (("train", train), ("validation", validation))
        }
    with file_errors(f"cannot write to {folder}", "set data.path to a folder you can write"):
        folder.mkdir(parents=True, exist_ok=True)
        if any(not file.name.endswith(PARTIAL) for file in folder.iterdir()):
            raise UserError(
                f"{folder} holds files but no manifest.json: set data.path to a new or empty folder"
            )
        write_manifest(folder, make_manifest(config, tokenizer, splits, found[0].dtype))


def find_files(source: str, kind: str, place: str) -> dict[str, list[Path]]:
    """Return the files of tokens that a source names, sorted, as absolute paths, by their split.

    A file that is named outright is one to train on, whatever its name. Raises `UserError`.
    """
    path = Path(os.path.expanduser(place))
    if kind == "megatron" and not path.is_dir():
        path = Path(str(path).removesuffix(".idx").removesuffix(".bin") + ".bin")
    is_folder = path.is_dir()
    fixed = fixed_parts(path)
    names = ["*.bin"] if is_folder else path.parts[fixed:]
    found = FoundFiles()
    with say_if_long(looking(place, "data.source")):
        found.add(below(path, fixed, names), fixed, names)
    splits: dict[str, list[Path]] = {"train": [], "validation": [], "test": []}
    for file in found.told():
        split = split_of(file.parts[fixed:])
        if is_folder and kind != "megatron" and not split:
            if not (part := re.search("train|val", file.name)):
                continue  # there may be other files beside the tokens
            split = {"train": "train", "val": "validation"}[part[0]]
        splits[split or "train"].append(Path(os.path.abspath(file)))
    if not any(splits.values()):
        raise no_tokens(source, kind, path)
    return splits


def no_tokens(source: str, kind: str, path: Path) -> UserError:
    """Return the error of a path that has no tokens of another program."""
    outright = fixed_parts(path) == len(path.parts)
    if kind in MAKERS and outright and not path.suffix and not path.exists():
        files, maker = MAKERS[kind]
        return UserError(
            f'data.source = "{source}": no folder {path} with {files}: run {maker}, or name its '
            f"folder ({other_path(path)})"
        )
    looked_for = ["*.bin"] if kind == "megatron" else ["*train*.bin", "*val*.bin"]
    wanted = [path / name for name in looked_for] if path.is_dir() else [path]
    return UserError(
        f'data.source = "{source}" finds no file {" or ".join(map(str, wanted))}: '
        f"{other_path(path)}"
    )


def split_of(names: Sequence[str]) -> str:
    """Return the split that the names of a file and of the folders above it say; "" if none do.

    The last word that names one counts.
    """
    apart = re.sub("([a-z])([A-Z])", r"\1 \2", "/".join(names))
    words = re.findall("[a-z]+", apart.lower())
    said = [SPLIT_WORDS[word] for word in words if word in SPLIT_WORDS]
    return said[-1] if said else ""


def nanogpt_tokens(file: Path) -> ForeignTokens:
    """Return the tokens of a file without a header."""
    size, start = read_start(file, LOOKED_AT)
    check_numbers(file, start, size)
    return ForeignTokens(file, 0, size // 2, "uint16")


def llmc_tokens(file: Path) -> ForeignTokens:
    """Return the tokens of a file with llm.c's header."""
    size, header = read_start(file, LLMC_HEADER)
    if len(header) < LLMC_HEADER:
        raise UserError(f"{file} ends within its header, after {size} bytes: copy it again")
    magic, version, count = struct.unpack_from("<3i", header)
    if magic not in LLMC_KINDS:
        known = " or ".join(map(str, LLMC_KINDS))
        raise UserError(
            f"{file} has the magic number {magic}, llm.c's tokens have {known}: "
            "set another data.source, or make the file again with today's llm.c"
        )
    known_version, dtype = LLMC_KINDS[magic]
    if version != known_version:
        raise UserError(
            f"{file} has version {version}, {known_version} is read: "
            "make the file again with today's llm.c"
        )
    tokens = ForeignTokens(file, LLMC_HEADER, count, dtype)
    if size != tokens.end or count < 1:
        raise UserError(
            f"{file} has {size - LLMC_HEADER} bytes after its header, which says {count} {dtype} "
            "tokens: copy it again"
        )
    return tokens


def megatron_tokens(file: Path) -> ForeignTokens:
    """Return the tokens of a file that an index beside it describes."""
    index_file = file.with_suffix(".idx")
    size, _ = read_start(file, 0)
    index_size, header = read_start(index_file, MEGATRON_HEADER.size)
    remedy = "copy it again, or make it again with Megatron's preprocess_data.py"
    if not header.startswith(MEGATRON_MAGIC):
        raise UserError(f"{index_file} does not begin as Megatron's indices do: {remedy}")
    if len(header) < MEGATRON_HEADER.size:
        raise UserError(f"{index_file} ends within its header: {remedy}")
    _, version, code, sequences, documents = MEGATRON_HEADER.unpack(header)
    if version != 1:
        raise UserError(f"{index_file} has version {version}, 1 is read: {remedy}")
    if code not in MEGATRON_DTYPES:
        name = MEGATRON_OTHERS.get(code, f"code {code}")
        raise UserError(f"{index_file} says that tokens are {name}: uint16 and int32 are read")
    dtype = MEGATRON_DTYPES[code]
    itemsize = numpy_dtype(dtype).itemsize
    needed = MEGATRON_HEADER.size + sequences * (4 + 8) + documents * 8
    if index_size < needed:
        raise UserError(f"{index_file} has {index_size} bytes instead of {needed}: {remedy}")
    # The length of each sequence in tokens, its byte offset, and the number of the sequence after
    # each document, with a 0 before. Later data is for other models.
    with index_file.open("rb") as stream:
        stream.seek(MEGATRON_HEADER.size)
        lengths = np.fromfile(stream, "<i4", sequences)
        pointers, of_documents = (np.fromfile(stream, "<i8", n) for n in (sequences, documents))
    ends = np.cumsum(lengths, dtype=np.int64)
    total = int(ends[-1]) if sequences else 0
    gapless = np.array_equal(pointers, (ends - lengths) * itemsize)
    ordered = bool((of_documents[1:] >= of_documents[:-1]).all())
    whole = documents > 0 and of_documents[0] == 0 and of_documents[-1] == sequences and ordered
    if total * itemsize != size or total < 1 or not gapless or not whole:
        raise UserError(
            f"{index_file} does not fit {file}, which has {size} bytes: the index says "
            f"{total} {dtype} tokens: {remedy}"
        )
    before = np.concatenate([[0], ends])  # tokens before each sequence
    return ForeignTokens(file, 0, total, dtype, before[of_documents[1:]])


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


def scan(
    found: list[ForeignTokens],
    tokenizer: Tokenizer,
    shard_tokens: int,
    report: Callable[[int], object],
) -> Split:
    """Return the split that has these tokens, which are all read.

    Calls `report` with the numbers of tokens read. Raises `UserError` for a token that the
    tokenizer does not have, and for a document that begins with another one than it says.
    """
    end, begin = tokenizer.end_of_text, tokenizer.begin_token
    parts = [
        each.part(begin, min(begin + shard_tokens, each.count))
        for each in found
        for begin in range(0, each.count, shard_tokens)
    ]

    def read(part: ForeignTokens) -> tuple[Shard, int, int]:
        """Return a shard, its largest token and its documents."""
        ends = 0
        if part.ends is not None:
            bounds = [part.offset // part.itemsize, part.end // part.itemsize]
            ends = int(np.diff(np.searchsorted(part.ends, bounds, side="right"))[0])

        def look(tokens: np.ndarray) -> None:
            nonlocal ends
            if part.ends is None:
                ends += int(np.count_nonzero(tokens == end))
            if begin is not None and (tokens[1:][tokens[:-1] == end] != begin).any():
                raise UserError(
                    f"{part.file} has documents that do not begin with token {begin}, as "
                    'data.begin_token says: set it to "none", or to the token that they begin with'
                )
            report(len(tokens))

        with must_be_read(part.file):
            digest, largest = digest_and_largest(part.file, part.offset, part.end, part.dtype, look)
        if largest >= tokenizer.vocab_size:
            raise UserError(
                f"{part.file} has token id {largest}, beyond the {tokenizer.vocab_size} of "
                f'data.tokenizer = "{tokenizer.name}": set the tokenizer that the tokens were '
                "made with"
            )
        return Shard(str(part.file), part.count, digest, part.offset), largest, ends

    with ThreadPoolExecutor() as pool:  # hashing and counting release the interpreter lock
        shards, largest, documents = zip(*pool.map(read, parts))
    return Split(sum(part.count for part in parts), sum(documents), max(largest), list(shards))


def read_start(file: Path, count: int) -> tuple[int, bytes]:
    """Return the bytes of a regular file: how many, and the first `count`. Raises `UserError`."""
    if wrong := path_problem(file, "file"):
        raise UserError(f"{file} cannot be read ({wrong}): name files of tokens")
    with must_be_read(file):
        return file.stat().st_size, b"".join(read_chunks(file, 0, count))


@contextlib.contextmanager
def must_be_read(file: Path) -> Iterator[None]:
    """Raise `UserError` if the body cannot read a file."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror}): restore it") from None
