"""metrics.jsonl: one line of JSON for each report, kept through crashes and full disks."""

import contextlib
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from types import NoneType

from torchmars.core.console import say
from torchmars.core.errors import file_errors
from torchmars.core.files import is_at, open_to_write, write_durably
from torchmars.metrics.lines import Row, check_types, opened, parse_line, read_lines, warn_of_damage

METRICS_FILE = "metrics.jsonl"


class Journal:
    """Appends lines to a file.

    A line that the disk refuses is kept, and written with a later one. The first time a warning is
    printed.
    """

    def __init__(
        self,
        path: Path,
        step: int,
        validated: bool,
        deleted: Callable[[int, Path], None],
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Open the file `path` to continue after `step`, see `rewind`.

        `deleted` is told of a step at which the file turns out to be deleted, see
        `EventLog.deleted`. `check` raises where the file is another process's by now.
        """
        self.path, self.warned, self.deleted = path, False, deleted
        self.check = check
        self.descriptor: int | None = None
        self.rewind(step, validated)

    def rewind(self, step: int, validated: bool) -> None:
        """Drop the lines of later steps, and of a validation after `step` unless `validated`.

        They are made again. Raises `UserError` if the file cannot be written.
        """
        self.check()
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None
        self.pending = b""
        rows = read_lines(self.path, measurements)
        warn_of_damage(self.path, rows.damaged)
        kept = [json.dumps(row) + "\n" for row in rows if is_kept(row, step, validated)]
        remedy = "make room, or set run.folder to a folder you can write"
        with file_errors(f"cannot write {self.path}", remedy):
            write_durably(self.path, "".join(kept))
            self._open()

    def write(self, step: int, values: dict[str, float]) -> None:
        """Append a line: the step and its measurements, null for one that is not finite."""
        self.check()
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        self.pending += json.dumps({"step": step} | finite).encode() + b"\n"
        if self.descriptor is not None and not is_at(self.descriptor, self.path):
            self.deleted(step, self.path)
            with contextlib.suppress(OSError):  # of a run folder that is gone, its lines are lost
                self._open()
        self._flush()

    def sync(self) -> None:
        """Make the lines so far durable."""
        self._flush(durably=True)

    def close(self) -> None:
        """Write pending lines, and close the file."""
        self._flush()
        if self.descriptor is not None:
            os.close(self.descriptor)

    def _open(self) -> None:
        """Open the file to add to it, a new one if there is none."""
        former = self.descriptor
        self.descriptor = open_to_write(self.path, os.O_WRONLY | os.O_APPEND)
        if former is not None:
            os.close(former)

    def _flush(self, durably: bool = False) -> None:
        if self.descriptor is None:  # after a failed rewind
            return
        try:
            while self.pending:
                self.pending = self.pending[os.write(self.descriptor, self.pending) :]
            if durably:
                os.fsync(self.descriptor)
        except OSError as error:
            if not self.warned:
                say(
                    f"warning: cannot write {self.path}: {error.strerror}; "
                    "its lines are kept until there is room",
                    error=True,
                )
            self.warned = True


def measurements(row: Row) -> Row:
    """Return a line's step and measurements. Raises `ValueError` for anything but numbers."""
    return check_types(row, {}, (float, int, NoneType))


def last_rows(file: Path, names: tuple[str, ...]) -> tuple[dict[str, Row], int]:
    """Return the newest line with each measurement of `names`, and how many lines are damaged.

    "step" stands for any measurement. The file is read from its end, only as far as needed: a long
    run takes no more time.
    """
    size, keys = 2**16, {name: f'"{name}": '.encode() for name in names}
    with opened(file) as stream:
        length = stream.seek(0, os.SEEK_END)
        while True:
            begin = max(length - size, 0)
            stream.seek(begin)
            # The first line is cut, unless the file begins with it; the last may not be complete.
            lines = stream.read(length - begin).split(b"\n")[begin > 0 :]
            found: dict[str, Row] = {}
            damaged = 0
            for number, line in enumerate(reversed(lines)):
                left = [name for name in names if name not in found]
                if not left:
                    return found, damaged
                if not any(keys[name] in line for name in left):
                    continue
                try:
                    row = measurements(parse_line(line))
                except ValueError:
                    damaged += number > 0
                    continue
                found |= {name: row for name in left if name in row}
            if begin == 0:
                break
            size *= 8
    return found, damaged


def last_row(file: Path, name: str) -> Row | None:
    """Return the newest line that has the measurement `name`, "step" for any; None without one."""
    return last_rows(file, (name,))[0].get(name)


def last_step(file: Path) -> int:
    """Return the step of the newest line, 0 without one."""
    row = last_row(file, "step")
    return 0 if row is None else int(row["step"])


def is_kept(row: Row, step: int, validated: bool) -> bool:
    """Return whether a line stays when the run goes back to `step`."""
    if row["step"] == step:
        return validated or "validation/loss" not in row
    return bool(row["step"] < step)
