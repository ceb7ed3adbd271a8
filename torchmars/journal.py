"""metrics.jsonl: one line of JSON for each report, kept through crashes and full disks."""

import json
import os
import sys
from pathlib import Path
from typing import Any

from torchmars.checkpoint.folder import write_durably
from torchmars.errors import UserError


class Journal:
    """Appends lines to a file. What the disk refuses is said once, kept, and written with a later line."""

    def __init__(self, path: Path, step: int) -> None:
        """Open the file `path` to go on after `step`. Raises `UserError` where it cannot be written."""
        self.path, self.pending, self.complained = path, b"", False
        self.descriptor: int | None = None
        try:
            self.rewind(step)
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror}: make room, or set run.folder to a folder you can write") from None

    def rewind(self, step: int) -> None:
        """Drop the lines of later steps: they are made again."""
        self.close()
        kept = []
        if self.path.exists():
            for line in self.path.read_text(encoding="utf-8").splitlines():
                try:
                    if json.loads(line)["step"] <= step:
                        kept.append(line + "\n")
                except ValueError:  # cut short by a crash
                    continue
        write_durably(self.path, "".join(kept))
        self.descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND)

    def write(self, values: dict[str, Any]) -> None:
        """Append one line."""
        self.pending += json.dumps(values).encode() + b"\n"
        try:
            while self.pending:
                self.pending = self.pending[os.write(self.descriptor, self.pending):]
        except OSError as error:
            if not self.complained:
                print(f"warning: cannot write {self.path}: {error.strerror}; its lines are kept until there is room", file=sys.stderr, flush=True)
            self.complained = True

    def close(self) -> None:
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None
