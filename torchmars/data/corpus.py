"""The corpus: which files a source means, in a fixed order, and what is read of each."""

import contextlib
import glob
import os
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from fsspec.implementations.local import LocalFileSystem

from torchmars.config import DataConfig
from torchmars.config.source import COMPRESSED, KINDS, parse_source
from torchmars.core.console import say
from torchmars.core.errors import UserError
from torchmars.core.files import sha256
from torchmars.core.places import place
from torchmars.core.words import counted
from torchmars.storage import storage_of
from torchmars.storage.objects import reading, store_of

HIDDEN = "."  # begins names that no folder and no glob means


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
    """A file of the corpus or a part of it, or a shard of a data set."""

    name: str
    """The file, as the config gave it, or the data set."""
    size: int
    """Bytes, of the part for one. A shard of a data set counts as 1."""
    begin: int = 0
    end: int | None = None
    """The part: bytes, or row groups of Parquet, `begin` to `end`; None: the whole file. Of a data
    set: which of how many shards."""


Piece = list[Input]
"""What is tokenised as one, and done again as one after a kill."""


def source_files(config: DataConfig) -> list[PurePath]:
    """Return the files of the corpus, sorted. A data set of Hugging Face has none.

    Raises `UserError` if a pattern matches none.
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
    found = (matching_files(pattern, source.kind, option) for pattern, option in patterns)
    return sorted({file for files in found for file in files})


def matching_files(
    pattern: str, kind: str, option: str, say: Callable[[str], object] = say
) -> list[PurePath]:
    """Return the files that a path, a folder or a glob names, sorted, on a disk or in a store.

    A folder gives the files below it whose names end as the kind of source has it, and a line says
    which others lie there. Hidden names are left out unless the pattern asks for them. Raises
    `UserError`, which names the `option`, for none.
    """
    path = place(os.path.expanduser(pattern), option, pattern=True)
    wild = (number for number, part in enumerate(path.parts) if glob.has_magic(part))
    begin, ends = next(wild, len(path.parts)), KINDS[kind].suffixes

    def is_hidden(file: PurePath) -> bool:
        return any(part.startswith(HIDDEN) for part in file.parts[begin:])

    found, is_folder = named_files(path)
    if not is_hidden(path):
        found = [file for file in found if not is_hidden(file)]
    others: list[PurePath] = []
    if is_folder:
        packed = [end + more for end in ends for more in COMPRESSED if KINDS[kind].plain]
        others = [file for file in found if not file.name.endswith((*ends, *packed))]
        found = [file for file in found if file.name.endswith((*ends, *packed))]
    left = ""
    if others:
        end = "".join(others[0].suffixes[-2:]) or others[0].name
        left = (
            f"{pattern} has {counted(len(others), 'file')} of other ends than {', '.join(ends)} "
            f"(the first: {others[0]}): a glob such as **/*{end} reads them"
        )
    if not found:
        here = f"paths count from the folder that you start in, {os.getcwd()}"
        raise UserError(f"{option}: {pattern!r} names no {kind} file: {left or here}")
    if left:
        say(f"{option}: {left}")
    return found


def named_files(path: PurePath) -> tuple[list[PurePath], bool]:
    """Return the files that a path names, sorted, and whether it is that of a folder.

    Links to folders are not followed. Raises `UserError`.
    """
    name, bucket = str(path), "" if isinstance(path, Path) else f"{path.parts[0]}//"
    here = glob.escape(os.getcwd())  # fsspec joins it to a pattern, and tells absolute names
    as_named = str if bucket or path.is_absolute() else os.path.relpath
    with reading(path) if bucket else contextlib.nullcontext():
        files = store_of(path) if bucket else LocalFileSystem()
        if is_folder := files.isdir(name):
            found = files.find(name, detail=True)
        elif files.exists(name):
            found = {name.removeprefix(bucket): {"type": "file"}}
        else:
            try:
                found = files.glob(name if bucket else os.path.join(here, name), detail=True)
            except ValueError as error:
                raise UserError(f"{name!r} is no glob: {error}") from None
    # Some stores have an object for a folder. Of a disk, a link leads to a file or to nothing.
    names = [
        each
        for each, its in found.items()
        if its["type"] != "directory" and not each.endswith("/")
        if bucket or os.path.isfile(each) or not os.path.exists(each)
    ]
    return sorted(type(path)(f"{bucket}{as_named(each)}") for each in names), is_folder


def open_place(name: str) -> Any:
    """Open a file of the corpus, buffered. Raises `OSError`, and `UserError` for a store's."""
    path = place(name, pattern=True)
    return path.open("rb") if isinstance(path, Path) else storage_of(path).open(path)


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
