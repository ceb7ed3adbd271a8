"""metrics.jsonl: one line of JSON for each report, kept through crashes and full disks."""

import json
import os
from pathlib import Path
from typing import Any

from torchmars.core.console import say
from torchmars.core.errors import UserError
from torchmars.core.files import write_durably


class Journal:
    """Appends lines to a file. What the disk refuses is said once, kept, and written with a later line."""

    def __init__(self, path: Path, step: int, validated: bool) -> None:
        """Open the file `path` to go on after `step`, see `rewind`."""
        self.path, self.complained = path, False
        self.descriptor: int | None = None
        self.rewind(step, validated)

    def rewind(self, step: int, validated: bool) -> None:
        """Drop the lines of later steps, and of a validation after `step` unless `validated`: they are made again.

        Raises `UserError` where the file cannot be written.
        """
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None
        self.pending, kept = b"", []
        try:
            for line in (
                self.path.read_text(encoding="utf-8", errors="replace").splitlines()
                if self.path.exists()
                else []
            ):
                try:
                    values = json.loads(line)
                    if (
                        values["step"] < step
                        or values["step"] == step
                        and (validated or "validation/loss" not in values)
                    ):
                        kept.append(line + "\n")
                except (ValueError, KeyError, TypeError):  # cut short by a crash
                    continue
            write_durably(self.path, "".join(kept))
            self.descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND)
        except OSError as error:
            raise UserError(
                f"cannot write {self.path}: {error.strerror}: make room, or set run.folder to a folder you can write"
            ) from None

    def write(self, values: dict[str, Any]) -> None:
        """Append one line."""
        self.pending += json.dumps(values).encode() + b"\n"
        self._flush()

    def sync(self) -> None:
        """Make what is written durable."""
        self._flush(durably=True)

    def close(self) -> None:
        if self.descriptor is not None:  # there is none after a failed rewind
            self._flush()
            os.close(self.descriptor)

    def _flush(self, durably: bool = False) -> None:
        try:
            while self.pending:
                self.pending = self.pending[os.write(self.descriptor, self.pending) :]
            if durably:
                os.fsync(self.descriptor)
        except OSError as error:
            if not self.complained:
                say(
                    f"warning: cannot write {self.path}: {error.strerror}; its lines are kept until there is room",
                    error=True,
                )
            self.complained = True
