"""What happens to files, and to the process that writes them."""

import hashlib
import itertools
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

DURABLE = ("fsync", "rename", "truncate", "unlink", "rmdir")


def die_at(number: int) -> None:
    """Let this process die at the `number`-th call that makes something durable or visible."""
    numbers = itertools.count(1)

    def counted(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            if next(numbers) == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **options)

        return call

    for name in DURABLE:
        setattr(os, name, counted(getattr(os, name)))


def flip(file: Path, bit: int) -> None:
    """Let one bit of a file fall over."""
    data = bytearray(file.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    file.write_bytes(data)


def sealed(entries: dict[str, Any]) -> str:
    """Return the text of a manifest whose checksum is right, whatever it says."""
    entries = {key: value for key, value in entries.items() if key != "sha256"}
    digest = hashlib.sha256(json.dumps(entries, indent=1).encode()).hexdigest()
    return json.dumps(entries | {"sha256": digest}, indent=1) + "\n"


def spoil(folder: Path, name: str, number: int) -> None:
    """Change a bit of one of the two copies in memory of a rank."""
    (file,) = folder.rglob(f"{name}-of-*-{number}")
    flip(file, 4 * file.stat().st_size)
