"""metrics.jsonl: one line of JSON for each report, kept through crashes and full disks."""

import contextlib
import json
import math
import os
from pathlib import Path
from typing import Any

from torchmars.core.console import say
from torchmars.core.errors import UserError
from torchmars.core.files import write_durably

METRICS_FILE = "metrics.jsonl"


class Journal:
    """Appends lines to a file.

    A line that the disk refuses is kept, and written with a later one. The first time a warning is
    printed.
    """

    def __init__(self, path: Path, step: int, validated: bool) -> None:
        """Open the file `path` to go on after `step`, see `rewind`."""
        self.path, self.warned = path, False
        self.pending = b""
        self.descriptor: int | None = None
        self.rewind(step, validated)

    def rewind(self, step: int, validated: bool) -> None:
        """Drop the lines of later steps, and of a validation after `step` unless `validated`.

        They are made again. Raises `UserError` if the file cannot be written.
        """
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None
        self.pending = b""
        try:
            text = ""
            if self.path.exists():
                text = self.path.read_text(encoding="utf-8", errors="replace")
            lines = [line for line in text.splitlines() if is_kept(line, step, validated)]
            write_durably(self.path, "".join(line + "\n" for line in lines))
            self.descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND)
        except OSError as error:
            raise UserError(
                f"cannot write {self.path}: {error.strerror}: "
                "make room, or set run.folder to a folder you can write"
            ) from None

    def write(self, step: int, values: dict[str, float]) -> None:
        """Append a line: the step and its measurements, null for one that is not finite."""
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        self.pending += json.dumps({"step": step} | finite).encode() + b"\n"
        self._flush()

    def sync(self) -> None:
        """Make what is written durable."""
        self._flush(durably=True)

    def close(self) -> None:
        """Write what is pending, and close the file."""
        self._flush()
        if self.descriptor is not None:
            os.close(self.descriptor)

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


def last_row(file: Path, name: str) -> dict[str, Any] | None:
    """Return the newest line that has the measurement `name`, "step" for any; None without one.

    It is read from the end of the file, so that it takes no time for a long run.
    """
    key, size = f'"{name}": '.encode(), 2**16
    with contextlib.suppress(OSError), file.open("rb") as stream:
        length = stream.seek(0, os.SEEK_END)
        while True:
            begin = max(length - size, 0)
            stream.seek(begin)
            lines = stream.read(length - begin).split(b"\n")
            # The first one is cut, unless the file begins with it.
            for line in reversed(lines[begin > 0 :]):
                with contextlib.suppress(ValueError):
                    if key in line and isinstance(row := json.loads(line), dict):
                        return row
            if begin == 0:
                return None
            size *= 8
    return None


def last_step(file: Path) -> int:
    """Return the step of the newest line, 0 without one."""
    row = last_row(file, "step")
    return 0 if row is None else int(row["step"])


def is_kept(line: str, step: int, validated: bool) -> bool:
    """Return whether a line stays when the run goes back to `step`."""
    try:
        values = json.loads(line)
        if values["step"] == step:
            return validated or "validation/loss" not in values
        return values["step"] < step
    except (ValueError, KeyError, TypeError):  # cut short by a crash
        return False
