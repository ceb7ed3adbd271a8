"""The lines of JSON that a run appends to its files: metrics.jsonl and events.jsonl.

A crash, a full disk or an editor may damage a line. It costs no other line, and is counted.
"""

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from torchmars.core.console import say
from torchmars.core.errors import file_errors
from torchmars.core.files import is_gone, open_file, open_to_write, write_durably
from torchmars.core.words import counted

METRICS_FILE = "metrics.jsonl"
T = TypeVar("T")
Row = dict[str, Any]


class Journal:
    """Appends lines to a file of a run. Nothing that goes wrong with the file ends the run.

    A line that the disk refuses is left out; the first time a warning is printed.
    """

    def __init__(self, file: Path, check: Callable[[], None] = lambda: None) -> None:
        """Append to `file`, which need not exist.

        `check` raises where the file is another process's by now.
        """
        self.file, self.check, self.warned = file, check, False

    def write(self, row: Row) -> None:
        """Append a line with a step and more."""
        self.check()
        line = json.dumps(row).encode() + b"\n"
        self._open(lambda descriptor: append(descriptor, line))

    def sync(self) -> None:
        """Make the lines so far durable."""
        self._open(os.fsync)

    def rewind(self, step: int, validated: bool) -> None:
        """Drop the lines of later steps, and of a validation after `step` unless `validated`.

        They are made again. Raises `UserError` if the file cannot be read or written.
        """
        self.check()
        rows = read_lines(self.file, measurements)
        warn_of_damage(self.file, rows.damaged)
        kept = [json.dumps(row) + "\n" for row in rows if is_kept(row, step, validated)]
        remedy = "make room, or set run.folder to a folder you can write"
        with file_errors(f"cannot write {self.file}", remedy):
            write_durably(self.file, "".join(kept))

    def _open(self, use: Callable[[int], None]) -> None:
        """Open the file for `use`, a new one if there is none."""
        try:
            descriptor = open_to_write(self.file, os.O_RDWR | os.O_APPEND)
            try:
                use(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            # Where the run's folder is gone, the run ends by itself.
            if not self.warned and error.errno != errno.ENOENT:
                said = f"{error.strerror}; lines that it does not take are left out"
                say(f"warning: cannot write {self.file}: {said}", error=True)
                self.warned = True


def append(descriptor: int, line: bytes) -> None:
    """Append a line to an open file, all of it or nothing. Raises `OSError`.

    A crash may have cut the file's last line short.
    """
    size = os.fstat(descriptor).st_size
    if size and os.pread(descriptor, 1, size - 1) != b"\n":
        line = b"\n" + line
    if os.write(descriptor, line) < len(line):
        os.ftruncate(descriptor, size)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def is_kept(row: Row, step: int, validated: bool) -> bool:
    """Return whether a line stays when the run goes back to `step`."""
    if row["step"] == step:
        return validated or "validation/loss" not in row
    return bool(row["step"] < step)


class Lines(list[T]):
    """The contents of a file's lines, in their order."""

    damaged = 0
    """How many lines were left out."""


# Numbers of hundreds of digits, and brackets in thousands of others.
BEYOND = (OverflowError, RecursionError)


def read_lines(file: Path, read: Callable[[Row], T]) -> Lines[T]:
    """Return the results of `read` for each line of a file; nothing if there is no file.

    A line for which `read` raises any of the usual errors is none of this file. Raises `UserError`
    if the file cannot be read.
    """
    found: Lines[T] = Lines()
    with file_errors(f"cannot read {file}"):
        if is_gone(file):
            return found
        with open_file(file) as stream:
            for line in stream:
                try:
                    found.append(read(json.loads(line)))
                except (ValueError, TypeError, LookupError, AttributeError, *BEYOND):
                    # The last line may be one that is just being written.
                    found.damaged += line.endswith(b"\n") and bool(line.strip())
    return found


def measurements(row: Row) -> Row:
    """Return a line's step and measurements. Raises `ValueError` for anything but numbers."""
    numbers = all(value is None or type(value) in (int, float) for value in row.values())
    if not numbers or type(row["step"]) is not int or not 0 <= row["step"] < 2**63:
        raise ValueError("it has other things than numbers, or no step")
    for value in row.values():
        float(value or 0)  # not one of hundreds of digits
    return row


def last_step(file: Path) -> int:
    """Return the step of the newest line of metrics.jsonl, 0 without one.

    Raises `UserError` if the file cannot be read.
    """
    return max((row["step"] for row in read_lines(file, measurements)[-1:]), default=0)


def warn_of_damage(path: Path, lines: int) -> None:
    """Print how many lines were left out of the file or files that `path` names, if any were."""
    if lines:
        what = counted(lines, "damaged line is", "damaged lines are")
        say(f"warning: {path}: {what} left out", error=True)
