"""Paths and texts given by Python code; errors name the argument."""

import os
from pathlib import Path
from typing import Any

from torchmars.core.errors import UserError
from torchmars.core.files import name_problem


def as_path(value: Any, name: str) -> Path:
    """Return a path that Python code gives. Raises `UserError` if it is not a path."""
    path = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(path, str):
        raise UserError(f"{name} must be a path, got {value!r:.80}")
    if wrong := name_problem(path) if path else "it is empty":
        raise UserError(f"{name}: {path!r:.80} cannot be a path ({wrong})")
    return Path(path)


def as_text(value: Any, name: str) -> str:
    """Return a text. Raises `UserError` if it is not a text."""
    try:
        if isinstance(value, str) and value.encode() is not None:
            return value
    except UnicodeEncodeError:  # half of a pair of UTF-16
        pass
    raise UserError(f"{name} must be text, got {value!r:.80}")


def texts_of(values: Any, name: str) -> list[str]:
    """Return a list of texts. Raises `UserError` if it is not one."""
    if not isinstance(values, list | tuple):
        raise UserError(f"{name} must be text, or a list of texts, got {values!r:.80}")
    return [as_text(each, name) for each in values]
