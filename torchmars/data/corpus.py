"""The corpus: documents of the standard library or of the user's files, in a fixed order."""

import glob
import hashlib
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from torchmars.config import DataConfig
from torchmars.core.errors import UserError

SEPARATOR = "<|endoftext|>"  # alone on a line, it ends a document of a text file
SUFFIXES = (".txt", ".md")  # what is read below a folder


def source_files(config: DataConfig) -> list[Path]:
    """Return the files of the corpus, sorted.

    Raises `UserError` if a pattern of data.files matches none.
    """
    if config.source == "stdlib":
        return _stdlib_files()
    files: set[Path] = set()
    for pattern in config.files:
        path = Path(os.path.expanduser(pattern))
        if os.path.isdir(path):
            found = [file for file in path.rglob("*") if file.suffix in SUFFIXES and file.is_file()]
        else:
            found = [
                Path(name) for name in glob.glob(str(path), recursive=True) if Path(name).is_file()
            ]
        if not found:
            read = f" (a folder gives its {' and '.join(SUFFIXES)} files)"
            raise UserError(
                f"data.files: {pattern!r} names no text file{read * os.path.isdir(path)}"
            )
        files.update(found)
    return sorted(files)


def documents(config: DataConfig, file: Path) -> Iterator[str]:
    """Yield the documents of one file of the corpus.

    Raises `UserError` for a text file that is not UTF-8.
    """
    lines: list[str] = []
    try:
        if config.source == "stdlib":
            yield file.read_text(encoding="utf-8", errors="replace")
            return
        with file.open(encoding="utf-8") as stream:
            for line in stream:
                if line.strip() == SEPARATOR:
                    yield "".join(lines)
                    lines = []
                else:
                    lines.append(line)
    except UnicodeDecodeError as error:
        raise UserError(
            f"data.files: {file} is not UTF-8 text (byte {error.start}): convert it or leave it out"
        ) from None
    except OSError as error:
        raise UserError(f"cannot read {file} of the corpus: {error.strerror}") from None
    yield "".join(lines)


def _stdlib_files() -> list[Path]:
    """Return Python's own sources, about 12 MB.

    Its tests, installed packages and exact copies are left out.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}
    files, seen = [], set()
    for file in sorted(root.rglob("*.py")):
        if not skipped.intersection(file.relative_to(root).parts):
            digest = hashlib.sha256(file.read_bytes()).digest()
            if digest not in seen:
                seen.add(digest)
                files.append(file)
    return files
