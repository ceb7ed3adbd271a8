"""The corpus: its files or shards in a fixed order, and the pieces that tasks share."""

import contextlib
import functools
import os
import re
import sysconfig
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from torchmars.config import DataConfig
from torchmars.config.source import KINDS, DataSource, parse_source
from torchmars.core.errors import UserError, file_errors, needs_package
from torchmars.core.files import sha256
from torchmars.data.files import COMPRESSED, FoundFiles, matches
from torchmars.data.hub import distrust_hub, hub_or_cache
from torchmars.storage.objects import size_and_time

# In what `datasets` raises of a data set that comes as a program: from release 4 on, and before.
NEEDS_SCRIPT = re.compile("scripts are no longer supported|trust_remote_code")
PIECES = 2048  # about how many pieces a large corpus has


@dataclass(frozen=True)
class Sizes:
    """How a corpus is cut. Other sizes give the same tokens in other files.

    All are in bytes, but `shard_tokens`.
    """

    piece: int = 2**24
    """The least of a piece."""
    block: int = 2**21
    """Text that is tokenised at once."""
    document: int = 2**25
    """A longer document is cut, a longer record of a file of records is damaged."""
    shard_tokens: int = 100_000_000


@dataclass(frozen=True)
class Input:
    """A file of the corpus, or a range of its bytes, or a shard of a data set."""

    name: str
    """The file, as the config gave it, or the data set."""
    size: int
    """Bytes, of the range for one. A shard of a data set counts as 1."""
    mtime_ns: int | None = None
    """When the file was last written."""
    begin: int = 0
    end: int | None = None
    """The range: documents that begin in bytes `begin` to `end`. None: a whole file."""
    shard: int = 0
    shards: int = 1
    """Which shard of how many of a data set."""


Piece = list[Input]


def corpus_pieces(config: DataConfig, sizes: Sizes) -> list[Piece]:
    """Return the pieces of the corpus.

    They depend on the corpus alone: consecutive files make one piece up to its size, and a file of
    plain text beyond it is cut into ranges. Raises `UserError`.
    """
    source = parse_source(config.source)
    if source.kind == "hf":
        count = load_dataset(source).num_shards
        return [[Input(source.dataset, 1, shard=number, shards=count)] for number in range(count)]
    files = []
    for file in source_files(config, tell=True):
        with file_errors(f"cannot read {file} of the corpus"):
            files.append(Input(str(file), *size_and_time(file)))
    size = max(sizes.piece, sum(each.size for each in files) // PIECES)
    pieces: list[Piece] = []
    room = 0
    for each in files:
        if each.size > size and is_plain(source.kind, each.name):
            pieces += [[part] for part in ranges(each, size)]
            room = 0
        elif pieces and each.size <= room:
            pieces[-1].append(each)
            room -= each.size
        else:
            pieces.append([each])
            room = size - each.size
    return pieces


def ranges(file: Input, size: int) -> list[Input]:
    """Return a file as ranges of at most `size` bytes, all of about the same size."""
    count = -(-file.size // size)
    cuts = [file.size * number // count for number in range(count + 1)]
    return [
        Input(file.name, end - begin, file.mtime_ns, begin, end)
        for begin, end in zip(cuts, cuts[1:])
    ]


def is_plain(kind: str, name: str) -> bool:
    """Return whether a file can be read from any of its bytes on."""
    return KINDS[kind].plain and not name.endswith(COMPRESSED)


def source_files(config: DataConfig, tell: bool = False) -> list[PurePath]:
    """Return the files of the corpus, sorted. A data set of Hugging Face has none.

    `tell` says which were left out. Raises `UserError` if a pattern matches none.
    """
    source = parse_source(config.source)
    if source.kind == "stdlib":
        return list(_stdlib_files())
    if not source.of_files:
        return []
    patterns = [(source.glob, "data.source")] if source.glob else []
    patterns += [(pattern, "data.files") for pattern in config.files]
    if not patterns:
        raise UserError("data.files is empty: name the files, folders or globs of the corpus")
    found = FoundFiles()
    for pattern, option in patterns:
        some = matches(pattern, source.kind, option)
        found.files |= some.files
        found.leftovers |= some.leftovers
    return found.told() if tell else found.once()


@functools.lru_cache(maxsize=1)  # the hub is asked once, not for each shard
def load_dataset(source: DataSource) -> Any:
    """Return a data set of Hugging Face, streamed.

    It comes from the hub, where NAME@REVISION names a revision of it, or from a local folder.
    Raises `UserError`.
    """
    with needs_package("datasets", "a source of Hugging Face"):
        import datasets
    distrust_hub()  # also a local data set may name files of a hub
    name, _, revision = source.dataset.partition("@")
    local = os.path.exists(source.dataset)
    if local:
        name, revision = source.dataset, ""
    options = {"revision": revision} if revision else {}
    problem = ""
    try:
        with contextlib.nullcontext("") if local else hub_or_cache() as problem:
            data = datasets.load_dataset(
                name, source.config or None, split=source.split, streaming=True, **options
            )
    except UserError:
        raise
    except Exception as error:  # whatever its loader, its network or its files have raised
        remedy = problem or "check its name, config and split, and the network"
        if NEEDS_SCRIPT.search(str(error)):
            remedy = (
                "it needs a loading script, which is not run: name a revision without one, such as "
                f"hf:{name}@refs/convert/parquet, or its files by parquet: or jsonl:"
            )
        raise UserError(
            f"data.source: cannot open the data set {source.dataset} ({in_a_line(error)}): {remedy}"
        ) from None
    columns = getattr(data, "column_names", None)  # not known of all data sets
    if columns and source.field not in columns:
        raise UserError(
            f"data.source: the data set {source.dataset} has no field {source.field!r}: name one "
            f"of {', '.join(columns)} (hf:DATASET:CONFIG:SPLIT:FIELD)"
        )
    return data


def in_a_line(error: Exception) -> str:
    """Return the first line of another package's error."""
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"


def _stdlib_files() -> list[Path]:
    """Return Python's own sources, about 12 MB.

    Its tests, installed packages and exact copies are left out.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}
    files: dict[str, Path] = {}  # by their content
    for file in sorted(root.rglob("*.py")):
        if not skipped.intersection(file.relative_to(root).parts):
            files.setdefault(sha256(file), file)
    return list(files.values())
