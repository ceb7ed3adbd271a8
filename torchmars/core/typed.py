"""Values of the types and bounds that a dataclass declares, out of TOML, JSON or a command line.

A field declares its bounds beside its type: `steps: Annotated[int, Range(1, 1_000_000)]`.
"""

import dataclasses
import difflib
import json
import math
import os
import re
import types
import typing
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from torchmars.core.errors import UserError

T = TypeVar("T")
LEVELS = 16  # of tables within tables: a file of ours has fewer, thousands exhaust Python's stack
CONTROL = re.compile(r"[\x00-\x1f\x7f]")


@dataclass(frozen=True)
class Range:
    """Bounds of a number: from `low`, included unless `open_low`, to `high`. NaN is outside."""

    low: float
    high: float
    open_low: bool = False

    def check(self, name: str, value: float) -> None:
        """Raise `UserError` for a value outside."""
        low = f"{'more than' if self.open_low else 'at least'} {self.low:,}"
        if not (value > self.low if self.open_low else value >= self.low):
            raise UserError(f"{name} must be {low}, got {value}")
        if value > self.high:
            raise UserError(f"{name} must be {low} and at most {self.high:,}, got {value}")


@dataclass(frozen=True)
class Name:
    """Bounds of a text that names one `kind`, "file" or "folder", without the folders above it."""

    kind: str

    def check(self, name: str, value: str) -> None:
        """Raise `UserError` for a text that is no such name."""
        wrong = value in ("", ".", "..") or "/" in value or CONTROL.search(value)
        if wrong or len(value.encode()) > 200:
            raise UserError(
                f"{name} must be one {self.kind} name of at most 200 bytes, got {value!r}"
            )


@dataclass(frozen=True)
class Place:
    """Bounds of a text that is the path of a file or folder."""

    def check(self, name: str, value: str) -> None:
        """Raise `UserError` for a text that is no such path."""
        wrong = not value or CONTROL.search(value) or len(value.encode()) > 3000
        if wrong or os.path.realpath(value) == "/":
            raise UserError(
                f"{name} must be the path of a file or folder, not empty and not /, got {value!r}"
            )


class Words(list[str]):
    """What the command line gives for one option: words that are not yet of the field's type.

    None of them: a flag, true.
    """


def fill(owner: Any, tables: dict[str, Any], source: str, prefix: str = "") -> None:
    """Set the fields of a dataclass, and of those within it, that `tables` names.

    `source` says in errors where the tables are from. Raises `UserError` for unknown names and
    wrong types; bounds are left to `check_bounds`.
    """
    for key, value in tables.items():
        name, hint = f"{prefix}{key}", hint_of(type(owner), key, source, prefix)
        if dataclasses.is_dataclass(hint):
            if not isinstance(value, dict):
                raise UserError(f"{name} {source} must be a table [{name}], got {value!r}")
            fill(getattr(owner, key), value, source, f"{name}.")
        else:
            setattr(owner, key, convert(value, hint, name, source))


def make(kind: type[T], table: dict[str, Any], source: str, prefix: str = "") -> T:
    """A dataclass of type `kind` with the fields that `table` names.

    Raises `UserError` as `fill` does, and for a field that is missing.
    """
    values = {}
    for key, value in table.items():
        hint = hint_of(kind, key, source, prefix)
        values[key] = convert(value, hint, f"{prefix}{key}", source)
    for each in dataclasses.fields(kind):
        if each.name not in values and each.default is each.default_factory is dataclasses.MISSING:
            raise UserError(f"{prefix}{each.name} is missing {source}")
    return kind(**values)


def hint_of(kind: type, key: str, source: str, prefix: str) -> Any:
    """The declared type of a field. Raises `UserError` with the nearest name for an unknown one."""
    known = [each.name for each in dataclasses.fields(kind)]
    if key not in known:
        nearest = difflib.get_close_matches(key, known, n=1, cutoff=0)[0]
        raise UserError(
            f"unknown {'key' if prefix else 'section'} {prefix}{key} {source}: "
            f"did you mean {prefix}{nearest}?"
        )
    return typing.get_type_hints(kind, include_extras=True)[key]


def bare(hint: Any) -> tuple[Any, tuple]:
    """A declared type without `| None` and without its bounds, and those."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        hint = next(option for option in typing.get_args(hint) if option is not type(None))
    if typing.get_origin(hint) is Annotated:
        return hint.__origin__, hint.__metadata__
    return hint, ()


def convert(value: Any, hint: Any, name: str, source: str) -> Any:
    """`value`, from TOML, JSON or a command line, as the declared type `hint`.

    Raises `UserError` where it is none.
    """
    optional = type(None) in typing.get_args(hint)
    if optional and (value is None or isinstance(value, Words) and value == ["None"]):
        return None
    hint, _ = bare(hint)
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if isinstance(value, Words):
        if not value and hint is not bool:
            raise UserError(f"{name} needs a value: it must be {describe(hint)}")
        each = bare(args[0])[0] if origin in (list, tuple) else hint
        words = [read_word(word, each) for word in value or ["true"]]
        value = words if origin in (list, tuple) or len(words) > 1 else words[0]
    if dataclasses.is_dataclass(hint) and isinstance(value, dict):
        return make(hint, value, source, f"{name}.")
    if origin is dict and isinstance(value, dict):
        return {key: convert(item, args[1], f"{name}.{key}", source) for key, item in value.items()}
    if origin is list and isinstance(value, list):
        return [convert(item, args[0], name, source) for item in value]
    if origin is tuple and isinstance(value, (list, tuple)) and len(value) == len(args):
        return tuple(convert(item, each, name, source) for item, each in zip(value, args))
    if origin is Literal and type(value) is str and value in args:
        return value
    if hint is float and type(value) is int:
        return as_float(value)
    if hint is str and type(value) is str and not is_text(value):
        raise UserError(f"{name} must be Unicode text without a NUL character, got {value!r}")
    if hint is Any or origin is None and type(value) is hint:
        return value
    raise UserError(f"{name} must be {describe(hint)}, got {value!r}")


def read_word(word: str, hint: Any) -> Any:
    """A word of the command line as the bool or number that `hint` is; itself where it is none."""
    if hint is bool:
        return {"true": True, "false": False}.get(word.lower(), word)
    try:
        return hint(word) if hint in (int, float) else word
    except ValueError:
        return word


def as_float(value: int) -> float:
    """A whole number as a float, infinite where it is too large for one."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def is_text(value: str) -> bool:
    """Whether a string can be written as UTF-8 and has no NUL character."""
    try:
        return b"\0" not in value.encode()
    except UnicodeEncodeError:
        return False


def describe(hint: Any) -> str:
    """A type as a user would say it."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return "one of " + ", ".join(f'"{choice}"' for choice in args)
    if origin is tuple:
        return f"{len(args)} numbers"
    if origin is list:
        kinds = {str: "a list of strings", float: "a list of numbers"}
        return kinds.get(bare(args[0])[0], "an array of tables")
    if dataclasses.is_dataclass(hint) or origin is dict:
        return "a table"
    return {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}[hint]


def check_bounds(value: Any, hint: Any, name: str = "") -> None:
    """Raise `UserError`, naming the field, where `value` or a value within it is out of its bounds.

    `hint` is the declared type of `value`.
    """
    hint, bounds = bare(hint)
    if value is None:
        return
    for bound in bounds:
        bound.check(name, value)
    if dataclasses.is_dataclass(value):
        for key, each in typing.get_type_hints(type(value), include_extras=True).items():
            check_bounds(getattr(value, key), each, f"{name}.{key}".removeprefix("."))
    elif typing.get_origin(hint) is dict:
        for key, item in value.items():
            check_bounds(key, typing.get_args(hint)[0], name)
            check_bounds(item, typing.get_args(hint)[1], f"{name}.{key}")
    elif typing.get_origin(hint) in (list, tuple):
        for item in value:
            check_bounds(item, typing.get_args(hint)[0], name)


def parse_json(text: str) -> dict[str, Any]:
    """A JSON text's object. Raises `ValueError` where there is none, or one nested too deeply."""
    try:
        value = json.loads(text)
    except RecursionError:
        value = None
    if not isinstance(value, dict) or nested(value, LEVELS):
        raise ValueError(f"it is no JSON object of at most {LEVELS} levels")
    return value


def nested(value: Any, levels: int) -> bool:
    """Whether tables and lists are nested deeper than `levels`."""
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels < 0 or any(nested(item, levels - 1) for item in items)
