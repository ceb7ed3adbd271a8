"""Files that a run appends lines of JSON to: lines of other than the declared types are left out.

A crash, a full disk or an editor may have damaged a line. It costs no other line, and is counted.
"""

import contextlib
import io
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from pydantic_core import from_json

from torchmars.core.console import say
from torchmars.core.errors import UserError
from torchmars.core.files import path_problem
from torchmars.core.words import counted

T = TypeVar("T")
Row = dict[str, Any]
LARGEST_STEP = 10**15
LARGEST_WHOLE = 2**63 - 1  # numpy, JavaScript and formats take no larger ones
LARGEST_FLOAT = 1e150  # larger ones overflow where they are added up or drawn


class Lines(list[T]):
    """The contents of a file's lines, in their order."""

    damaged = 0
    """How many lines were left out."""


def read_lines(file: Path, read: Callable[[Row], T]) -> Lines[T]:
    """Return the results of `read` for each line of a file; nothing if there is no file.

    `read` raises `ValueError` for a line of other than the declared types. Raises `UserError` if
    the file cannot be read.
    """
    found: Lines[T] = Lines()
    with opened(file) as stream:
        for line in stream:
            try:
                found.append(read(parse_line(line)))
            except ValueError:
                # The last line may be one that is just being written.
                found.damaged += line.endswith(b"\n") and bool(line.strip())
    return found


def warn_of_damage(path: Path, lines: int) -> None:
    """Print how many lines were left out of the file or files that `path` names, if any were."""
    if lines:
        what = counted(lines, "damaged line is", "damaged lines are")
        say(f"warning: {path}: {what} left out", error=True)


@contextlib.contextmanager
def opened(file: Path) -> Iterator[BinaryIO]:
    """Open a regular file to read it; if there is none, as if it were empty.

    Raises `UserError` if it cannot be read.
    """
    try:
        if wrong := path_problem(file, "file"):
            raise UserError(f"cannot read {file}: {wrong}")
        with file.open("rb") if file.exists() else io.BytesIO() as stream:
            yield stream
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}") from None


def parse_line(line: bytes) -> Row:
    """Return the object of a line that has a step. Raises `ValueError` for any other line."""
    try:
        row = from_json(line)
    except ValueError:  # also of a line that has halves of pairs of UTF-16
        try:
            row = json.loads(line)
        except RecursionError:
            raise ValueError("it is nested too deeply") from None
    step = row.get("step") if isinstance(row, dict) else None
    if type(step) is not int or not 0 <= step <= LARGEST_STEP:
        raise ValueError("it has no step")
    return row


def check_types(row: Row, declared: Mapping[str, tuple[type, ...]], other: tuple[type, ...]) -> Row:
    """Return a row whose values have the `declared` types, or else one of `other`.

    A list has numbers and texts. Raises `ValueError` for another type, for a whole number of more
    than 64 bits, and for a float beyond `LARGEST_FLOAT`.
    """
    for name, value in row.items():
        if type(value) not in declared.get(name, other):
            raise ValueError(f"{name} has another type")
        for each in value if type(value) is list else (value,):
            if type(each) in (list, dict):
                raise ValueError(f"{name} is nested")
            largest = {int: LARGEST_WHOLE, float: LARGEST_FLOAT}.get(type(each))
            if largest is not None and abs(each) > largest:
                raise ValueError(f"{name} is too large")
    return row
