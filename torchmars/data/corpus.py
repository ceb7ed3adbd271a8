"""The corpus: its files in a fixed order, the pieces that they are cut into, and their records.

One process reads, so it does no more than it must: it decompresses, and finds where lines,
documents and rows end. `documents` handles their contents.
"""

import bz2
import contextlib
import functools
import glob
import gzip
import io
import lzma
import os
import re
import sysconfig
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path, PurePath
from typing import Any

from fsspec.implementations.local import LocalFileSystem
from fsspec.utils import seek_delimiter

from torchmars.config import DataConfig
from torchmars.config.source import COMPRESSED, KINDS, DataSource, parse_source
from torchmars.core.console import say
from torchmars.core.errors import UserError, needs_package
from torchmars.core.files import LFS, sha256
from torchmars.core.places import place
from torchmars.core.words import counted
from torchmars.data.documents import Block, LostFile, Numbered, Record, documents_of
from torchmars.storage import storage_of
from torchmars.storage.objects import reading, store_of

# In bytes. Other sizes give the same tokens in other files.
PIECE = 2**24  # the least of a piece
BLOCK = 2**21  # text that is tokenised at once
LONGEST = 2**25  # a longer document is cut, a longer record of a file of records is damaged
PIECES = 2048  # about how many pieces a large corpus has
LOOKS = 8  # files that are looked at side by side: stores answer late
CHUNK = 2**18  # bytes read at once
Records = Iterator[tuple[int, Record]]  # each with the number of its first line, or its row
ROWS = 256  # read at once of a Parquet file
TEXT = (["string"], ["large_string"])  # Arrow's types of a column
UNPACKED: dict[str, Any] = {"gzip": gzip.open, "xz": lzma.open, "bz2": bz2.open}
MAGIC = re.compile(
    rb"(?P<gzip>\x1f\x8b\x08)|(?P<zstd>\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18)"
    rb"|(?P<xz>\xfd7zXZ\0)|(?P<bz2>BZh[1-9](1AY&SY|\x17rE8P\x90))"
)


@dataclass(frozen=True)
class Input:
    """A file of the corpus or a part of it, or a shard of a data set."""

    name: str
    """The file, as the config gave it, or the data set."""
    size: int
    """Bytes, of the part for one. A shard of a data set counts as 1."""
    begin: int = 0
    end: int | None = None
    """The part: bytes, or row groups of Parquet, `begin` to `end`; None: the whole file. Of a data
    set: which of how many shards."""


Piece = list[Input]  # tokenised as one, and done again as one after a kill


def source_files(config: DataConfig) -> list[PurePath]:
    """Return the files of the corpus, sorted. A data set of Hugging Face has none.

    Raises `UserError` if a pattern matches none.
    """
    source = parse_source(config.source)
    if source.kind == "stdlib":
        return _stdlib_files()
    if not source.of_files:
        return []
    patterns = [(source.glob, "data.source")] if source.glob else []
    patterns += [(pattern, "data.files") for pattern in config.files]
    if not patterns:
        raise UserError("data.files is empty: name the files, folders or globs of the corpus")
    found = (matching_files(pattern, source.kind, option) for pattern, option in patterns)
    return sorted({file for files in found for file in files})


def matching_files(
    pattern: str, kind: str, option: str, say: Callable[[str], object] = say
) -> list[PurePath]:
    """Return the files that a path, a folder or a glob names, sorted, on a disk or in a store.

    A folder gives the files below it whose names end as the kind of source has it, and a line says
    which others lie there. A folder and a glob mean no hidden names. Raises `UserError`, which
    names the `option`, for none.
    """
    path = place(os.path.expanduser(pattern), option, pattern=True)
    found, is_folder = named_files(path)
    hidden = {part for file in found for part in file.parts if part[0] == "."} - {*path.parts}
    found = [file for file in found if hidden.isdisjoint(file.parts)]
    if is_folder:
        ends, every = KINDS[kind].suffixes, found
        packed = [end + more for end in ends for more in COMPRESSED if KINDS[kind].plain]
        found = [file for file in every if file.name.endswith((*ends, *packed))]
        if others := sorted({*every} - {*found}):
            say(
                f"{option}: {pattern} has {counted(len(others), 'file')} of other ends than "
                f"{', '.join(ends)} (the first: {others[0]}): a glob such as "
                f"**/*{others[0].suffix} reads them"
            )
    if not found:
        raise UserError(
            f"{option}: {pattern!r} names no {kind} file: paths count from the folder that you "
            f"start in, {os.getcwd()}"
        )
    return found


def named_files(path: PurePath) -> tuple[list[PurePath], bool]:
    """Return the files that a path names, sorted, and whether it is that of a folder.

    Links to folders are not followed. Raises `UserError`.
    """
    name, bucket = str(path), "" if isinstance(path, Path) else f"{path.parts[0]}//"
    here = glob.escape(os.getcwd())  # fsspec joins it to a pattern, and tells absolute names
    as_named = str if bucket or path.is_absolute() else os.path.relpath
    with reading(path):
        files = store_of(path) if bucket else LocalFileSystem()
        is_folder = files.isdir(name)
        try:
            if files.exists(name):
                found = files.find(name, detail=True)
            else:
                found = files.glob(name if bucket else os.path.join(here, name), detail=True)
        except ValueError as error:
            raise UserError(f"{name!r} is no glob: {error}") from None
    # Some stores have an object for a folder. Of a disk, a link leads to a file or to nothing.
    names = [
        each
        for each, its in found.items()
        if its.get("type") != "directory" and not each.endswith("/")
        if bucket or os.path.isfile(each) or not os.path.exists(each)
    ]
    return sorted(type(path)(f"{bucket}{as_named(each)}") for each in names), is_folder


@contextlib.contextmanager
def input_file(name: str, stored: bool = True) -> Iterator[Any]:
    """Open a file of the corpus for the body, buffered, if one is `stored` under this name.

    Raises `LostFile` for what any library raises of its content in the body, and `UserError` for
    what a disk, a store or a data set raises. A `MemoryError` is none of the file.
    """
    path = place(name, pattern=True)
    try:
        with storage_of(path).open(path) if stored else contextlib.nullcontext() as stream:
            yield stream
    except (LostFile, UserError, MemoryError):
        raise
    except Exception as error:
        reason = f"({type(error).__name__}: {error})"
        if stored and not (isinstance(error, OSError) and error.errno):
            raise LostFile(f"from here on it cannot be read {reason}") from None
        raise UserError(
            f"cannot read {name} of the corpus {reason}: start again when it can be read; what is "
            "done is kept"
        ) from None


def _stdlib_files() -> list[PurePath]:
    """Return Python's own sources, about 12 MB.

    Its tests, installed packages and exact copies are left out.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}
    files = sorted(root.rglob("*.py"), reverse=True)
    own = [file for file in files if skipped.isdisjoint(file.relative_to(root).parts)]
    return sorted({sha256(file): file for file in own}.values())  # the first of each content


def corpus_pieces(source: DataSource, files: dict[str, int]) -> list[Piece]:
    """Return the pieces of a corpus whose files have so many bytes.

    They depend on the corpus alone: consecutive files make one piece up to its size, and a larger
    one is cut where its kind allows it. Raises `UserError`.
    """
    if source.kind == "hf":
        count = load_dataset(source).num_shards
        return [[Input(source.dataset, 1, number, count)] for number in range(count)]
    size = max(PIECE, sum(files.values()) // PIECES)
    cut = row_groups if source.kind == "parquet" else text_ranges
    pieces: list[Piece] = []
    room = 0
    with ThreadPoolExecutor(LOOKS) as threads:
        for inputs in threads.map(lambda name: cut(Input(name, files[name]), source, size), files):
            if pieces and len(inputs) == 1 and inputs[0].size <= room:
                pieces[-1] += inputs
                room -= inputs[0].size
            else:
                pieces += [[each] for each in inputs]
                room = size - inputs[0].size if len(inputs) == 1 else 0
    return pieces


def text_ranges(whole: Input, source: DataSource, size: int) -> list[Input]:
    """Return ranges of a file, of at least `size` bytes if it is plain; all of it if not.

    Each begins where a line of JSON or a document does. Raises `UserError`.
    """
    if whole.size <= size or not KINDS[source.kind].plain:
        return [whole]
    # Other forms of this line end documents too.
    border = b"\n" if source.kind == "jsonl" else b"\n<|endoftext|>\n"
    with input_file(whole.name) as stream:
        if MAGIC.match(stream.read(16)):
            return [whole]
        # Past its buffer, which has many megabytes of a store.
        raw, cuts = stream.raw, [0]
        while cuts[-1] + size < whole.size:
            raw.seek(cuts[-1] + size)
            seek_delimiter(raw, border, CHUNK)  # or to the end
            cuts.append(raw.tell())
    ends = sorted({*cuts, whole.size})
    return [Input(whole.name, end - begin, begin, end) for begin, end in pairwise(ends)]


def read_piece(piece: Piece, source: DataSource) -> Iterator[tuple[Block, int]]:
    """Yield the blocks of a piece, each with the bytes of it up to there. Raises `UserError`."""
    reader = READERS[source.kind]
    block: Block = []
    size = before = 0
    for each in piece:
        number, unit = 0, "row"
        if reader is text_records:
            unit = f"after byte {each.begin}, line" if each.begin else "line"
        try:
            with input_file(each.name, source.kind != "hf") as stream:
                for number, record in reader(stream, each, source):
                    block.append((each.name, unit, number, record))
                    size += 1 + (len(record) if isinstance(record, (bytes, str)) else 0)
                    if size >= BLOCK:
                        here = 0  # as long as it is not known
                        if reader is text_records:  # Arrow closes what it has read
                            here = each.size if stream.closed else stream.tell() - each.begin
                        yield block, before + here
                        block, size = [], 0
        except LostFile as error:
            block.append((each.name, unit, number + 1, error))
        before += each.size
    if block:
        yield block, before


def text_records(stream: Any, each: Input, source: DataSource) -> Records:
    """Yield the documents of a file of text, or the lines of one of JSON, or of a range of it."""
    if source.kind != "jsonl":
        return documents_of(lines_in(stream, each, CHUNK), LONGEST)
    lines = lines_in(stream, each, 0)
    return ((number, line.removesuffix(b"\n")) for number, line in lines if line.strip())


def lines_in(stream: Any, each: Input, size: int) -> Iterator[Numbered]:
    """Yield whole lines, the next one and those in `size` bytes before it.

    Of one of more than `LONGEST` bytes what is beyond may be left out.
    """
    stream.seek(each.begin)
    text, left = (stream, each.size) if each.end else (unpacked(stream, each.name), 2**62)
    number = 1
    while True:
        lines = text.read(min(size, left))
        lines += (rest := text.readline(min(LONGEST + 2, left - len(lines))))
        if not lines:
            break
        left -= len(lines)
        if len(rest) > LONGEST and not rest.endswith(b"\n"):
            lines += b"\n"
            while rest and not rest.endswith(b"\n"):
                rest = text.readline(min(CHUNK, left))
                left -= len(rest)
        yield number, lines
        number += lines.count(b"\n")


def unpacked(stream: Any, name: str) -> Any:
    """Return a stream of what a file holds, whatever it is compressed by.

    Its first bytes tell, not its name. Raises `LostFile`, and what its library raises of damage.
    What is packed more than three times is no text.
    """
    for _ in range(3):
        start = stream.peek(100)
        if start.startswith(LFS):
            raise LostFile("it is a pointer of Git LFS: get the file itself by git lfs pull")
        if not (found := MAGIC.match(start)):
            break
        if found.lastgroup == "zstd":
            with needs_package("pyarrow", f"reading {name}"):
                import pyarrow
            # Unlike the package zstandard it tells of a frame that is cut short.
            stream = io.BufferedReader(pyarrow.CompressedInputStream(stream, "zstd"), CHUNK)
        else:
            stream = UNPACKED[str(found.lastgroup)](stream)
            # Else those of xz and bzip2 end, silently, at what is none behind a whole one.
            stream._buffer.raw._trailing_error = ()
    return stream


def open_table(stream: Any, name: str, field: str) -> Any:
    """Open a Parquet file. Raises `UserError` if it has not one column of text of this name."""
    with needs_package("pyarrow", f"reading {name}"):
        import pyarrow.parquet
    # pre_buffer would hold all row groups in memory.
    table = pyarrow.parquet.ParquetFile(stream, pre_buffer=False, buffer_size=2**20)
    if [str(each.type) for each in table.schema_arrow if each.name == field] not in TEXT:
        columns = ", ".join(f"{each.name} ({each.type})" for each in table.schema_arrow)
        raise UserError(
            f"data.source: {name} has not one column {field!r} of strings: name one that has them, "
            f"of {columns} (parquet:GLOB:FIELD)"
        )
    return table


def row_groups(whole: Input, source: DataSource, size: int) -> list[Input]:
    """Return a Parquet file as runs of row groups, of about `size` bytes. Raises as `open_table`.

    A file that cannot be read is left to whoever reads its rows.
    """
    groups = 1
    with contextlib.suppress(LostFile), input_file(whole.name) as stream:
        groups = open_table(stream, whole.name, source.field).num_row_groups
    runs = max(1, min(groups, whole.size // size))
    return [
        Input(whole.name, whole.size // runs, groups * run // runs, groups * (run + 1) // runs)
        for run in range(runs)
    ]


def parquet_records(stream: Any, each: Input, source: DataSource) -> Records:
    """Yield the rows of a Parquet file, or of some of its row groups."""
    table = open_table(stream, each.name, source.field)
    groups = [*range(each.begin, each.end or 0)]
    number = 1 + sum(table.metadata.row_group(n).num_rows for n in range(each.begin))
    for batch in table.iter_batches(ROWS, row_groups=groups, columns=[source.field]):
        # As bytes, so that a value that is not UTF-8 is one damaged record.
        values = batch.column(source.field).cast("large_binary").to_pylist()
        yield from enumerate(values, number)
        number += len(values)


@functools.lru_cache(maxsize=1)  # the hub is asked once, not for each shard
def load_dataset(source: DataSource) -> Any:
    """Return a data set of Hugging Face, streamed, from the hub or a local folder.

    NAME@REVISION names a revision of one of the hub. Raises `UserError`.
    """
    with needs_package("datasets", "a source of Hugging Face"):
        import datasets
    name, _, revision = source.dataset.partition("@")
    if os.path.exists(source.dataset):
        name, revision = source.dataset, ""
    options: dict[str, Any] = {"revision": revision or None, "streaming": True}
    try:
        data = datasets.load_dataset(name, source.config or None, split=source.split, **options)
    except Exception as error:  # whatever its loader, its network or its files have raised
        raise UserError(
            f"data.source: cannot open the data set {source.dataset} ({type(error).__name__}: "
            f"{error}): check its name, config and split, and the network; for one that needs a "
            f"loading script, name a revision without one, as hf:{name}@refs/convert/parquet"
        ) from None
    columns = data.column_names  # not known of all data sets
    if columns and source.field not in columns:
        raise UserError(
            f"data.source: the data set {source.dataset} has no field {source.field!r}: name one "
            f"of {', '.join(columns)} (hf:DATASET:CONFIG:SPLIT:FIELD)"
        )
    return data


def dataset_records(stream: Any, shard: Input, source: DataSource) -> Records:
    """Yield the rows of a shard of a data set of Hugging Face."""
    rows = load_dataset(source).shard(num_shards=shard.end, index=shard.begin)
    for number, row in enumerate(rows, start=1):
        value = row.get(source.field)
        yield number, value if isinstance(value, (bytes, str)) else None


# By the kind of a source: from the stream of an input to its records.
READERS: dict[str, Callable[[Any, Input, DataSource], Records]] = {
    "stdlib": text_records,
    "text": text_records,
    "jsonl": text_records,
    "parquet": parquet_records,
    "hf": dataset_records,
}
