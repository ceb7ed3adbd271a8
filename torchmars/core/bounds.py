"""Bounds of a value, declared beside its type: `steps: Annotated[int, Range(1, 1_000_000)]`."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from torchmars.core.places import place_problem
from torchmars.core.typed import meant

CONTROL = re.compile(r"[\x00-\x1f\x7f]")


class Bounds:
    """Bounds that a field declares besides its type."""

    def check(self, value: Any) -> Any:
        """Return `value`. If it is out of bounds, raises `ValueError` with the bounds."""
        raise NotImplementedError

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """Return pydantic's check of the type with this check after it."""
        return core_schema.no_info_after_validator_function(self.check, handler(source))


@dataclass(frozen=True)
class Range(Bounds):
    """Bounds of a number: from `low`, included unless `open_low`, to `high`. NaN is outside."""

    low: float
    high: float
    open_low: bool = False

    def check(self, value: float) -> float:
        """Return a number within. Raises `ValueError` for one outside."""
        low = f"{'more than' if self.open_low else 'at least'} {self.low:,}"
        if not (value > self.low if self.open_low else value >= self.low):
            raise ValueError(f"must be {low}, got {value}")
        if value > self.high:
            raise ValueError(f"must be {low} and at most {self.high:,}, got {value}")
        return value


class OneOfTwo(Bounds):
    """Bounds of a value that is of one of two types."""

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """Return this check alone: pydantic's errors would name both types."""
        return core_schema.no_info_plain_validator_function(self.check)


@dataclass(frozen=True)
class WordOrNumber(OneOfTwo):
    """Bounds of a value that is one of some words, or else a number of at least 1."""

    words: tuple[str, ...]

    def check(self, value: Any) -> Any:
        """Return such a value. Raises `ValueError` for another one."""
        number = isinstance(value, int) and not isinstance(value, bool) and value >= 1
        if not number and value not in self.words:
            words = ", ".join(f'"{word}"' for word in self.words)
            near = f": {meant(str(value), self.words)}".rstrip(": ")
            raise ValueError(
                f"must be one of {words}, or a whole number of at least 1, got {value!r}{near}"
            )
        return value


@dataclass(frozen=True)
class WordOrFlag(OneOfTwo):
    """Bounds of a value that is a word, or else true or false."""

    word: str

    def check(self, value: Any) -> Any:
        """Return such a value. Raises `ValueError` for another one."""
        if not isinstance(value, bool) and value != self.word:
            raise ValueError(f'must be true, false or "{self.word}", got {value!r}')
        return value


@dataclass(frozen=True)
class Name(Bounds):
    """Bounds of a text that names one `kind`, "file" or "folder", without the folders above it."""

    kind: str

    def check(self, value: str) -> str:
        """Return such a name. Raises `ValueError` for another text."""
        wrong = value in ("", ".", "..") or "/" in value or CONTROL.search(value)
        if wrong or len(value.encode()) > 200:
            raise ValueError(f"must be one {self.kind} name of at most 200 bytes, got {value!r}")
        return value


@dataclass(frozen=True, eq=False)
class KeyOf(Bounds):
    """Bounds of a text that is a key of a table. Plugins may add to the table."""

    table: Mapping[str, Any]

    def check(self, value: str) -> str:
        """Return such a key. Raises `ValueError` for another text."""
        if value not in self.table:
            known = ", ".join(f'"{key}"' for key in self.table)
            near = f": {self.meant(value)}".rstrip(": ")
            raise ValueError(
                f"must be one of {known}, or a plugin's (--plugins), got {value!r}{near}"
            )
        return value

    def meant(self, value: str) -> str:
        """Return the question whether another key was meant; "" if none is like it."""
        return meant(value, [*self.table])


@dataclass(frozen=True)
class ModuleName(Bounds):
    """Bounds of a text that names a Python module."""

    def check(self, value: str) -> str:
        """Return such a name. Raises `ValueError` for another text."""
        if not all(part.isidentifier() for part in value.split(".")) or value.endswith(".py"):
            raise ValueError(f"must be a module as Python names it, without .py, got {value!r}")
        return value


@dataclass(frozen=True)
class Pattern(Bounds):
    """Bounds of a text that names files, also several: `matches` in data/corpus.py reads it."""

    def check(self, value: str) -> str:
        """Return such a text. Raises `ValueError` for another one."""
        wrong = not value or CONTROL.search(value) or len(value.encode()) > 3000
        if wrong or os.path.realpath(value) == "/":
            raise ValueError(
                f"must be the path of a file or folder, not empty and not /, got {value!r}"
            )
        return value


@dataclass(frozen=True)
class Place(Pattern):
    """Bounds of a text that is the path of a file or folder, with `stores` also of a store's."""

    stores: bool = False

    def check(self, value: str) -> str:
        """Return such a path. Raises `ValueError` for another text."""
        if wrong := place_problem(value, self.stores):
            raise ValueError(wrong)
        return super().check(value)


@dataclass(frozen=True)
class Local(Bounds):
    """Bounds of a text that is a name of ours, or a local file's, as it is or as NAME=FILE."""

    def check(self, value: str) -> str:
        """Return such a text. Raises `ValueError` for another one."""
        for text in (value, value.partition("=")[2]):
            if wrong := place_problem(text, stores=False):
                raise ValueError(wrong)
        return value
