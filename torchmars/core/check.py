"""Values of TOML, JSON and the command line, checked by pydantic against what dataclasses declare.

A field declares its type and its bounds: `Annotated[int, Interval(ge=1, le=1_000)]`. Nothing is
converted but a whole number where a float is declared. The first error becomes one line.
"""

import dataclasses
import difflib
import functools
import json
import os
import pathlib
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, cast

from annotated_types import Interval

from torchmars.core.errors import UserError
from torchmars.core.files import name_problem
from torchmars.core.places import place_problem

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler, TypeAdapter
    from pydantic_core import CoreSchema

T = TypeVar("T")
Where = Callable[[str], str] | str  # where values are from; a function of a setting's name

UNIONS = (typing.Union, types.UnionType)
MUST = "must be "
CONTROL = re.compile(r"[\x00-\x1f\x7f]")
LIKENESS = 0.65  # of a misspelt name, from 0 to 1; below it a hint misleads
# What pydantic calls types and bounds, and what users of TOML call them.
IN_WORDS = {
    "Input should be": "must be",
    "List should": "must",
    " after validation, not": ", got",
    "a valid integer": "a whole number",
    "a valid number": "a number",
    "a valid boolean": "true or false",
    "a valid string": "a string",
    "a valid array": "a list",
    "an object": "a table",
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
    "greater than": "more than",
}


class Bounds:
    """Bounds that a field declares beside its type, where `Interval` cannot say them."""

    def check(self, value: Any) -> Any:
        """Return `value`. If it is out of bounds, raises `ValueError` with the bounds."""
        raise NotImplementedError

    def __get_pydantic_core_schema__(
        self, source: Any, handler: "GetCoreSchemaHandler"
    ) -> "CoreSchema":
        """Return pydantic's check of the type with this check after it."""
        after: Any = {"type": "no-info", "function": self.check}
        return {"type": "function-after", "function": after, "schema": handler(source)}


@dataclasses.dataclass(frozen=True)
class Name(Bounds):
    """Bounds of a text that names one `kind`, "file" or "folder", without the folders above it."""

    kind: str

    def check(self, value: str) -> str:
        """Return such a name. Raises `ValueError` for another text."""
        wrong = value in ("", ".", "..") or "/" in value or CONTROL.search(value)
        if wrong or len(value.encode()) > 200:
            raise ValueError(f"must be one {self.kind} name of at most 200 bytes, got {value!r}")
        return value


@dataclasses.dataclass(frozen=True, eq=False)
class KeyOf(Bounds):
    """Bounds of a text that is a key of a table. Plugins may add to the table."""

    table: Mapping[str, Any]

    def check(self, value: str) -> str:
        """Return such a key. Raises `ValueError` for another text."""
        if value not in self.table:
            raise ValueError(
                f"must be one of {', '.join(self.table)}, or a plugin's (--plugins), got {value!r}"
                + question(nearest(value, self.table), ": ")
            )
        return value


@dataclasses.dataclass(frozen=True)
class ModuleName(Bounds):
    """Bounds of a text that names a Python module."""

    def check(self, value: str) -> str:
        """Return such a name. Raises `ValueError` for another text."""
        if not all(part.isidentifier() for part in value.split(".")) or value.endswith(".py"):
            raise ValueError(f"must be a module as Python names it, without .py, got {value!r}")
        return value


@dataclasses.dataclass(frozen=True)
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


@dataclasses.dataclass(frozen=True)
class Place(Pattern):
    """Bounds of a text that is the path of a file or folder, with `stores` also of a store's."""

    stores: bool = False

    def check(self, value: str) -> str:
        """Return such a path. Raises `ValueError` for another text."""
        if wrong := place_problem(value, self.stores):
            raise ValueError(wrong)
        return super().check(value)


@dataclasses.dataclass(frozen=True)
class Local(Bounds):
    """Bounds of a text that is a name of ours, or a local file's, as it is or as NAME=FILE."""

    def check(self, value: str) -> str:
        """Return such a text. Raises `ValueError` for another one."""
        for text in (value, value.partition("=")[2]):
            if wrong := place_problem(text, stores=False):
                raise ValueError(wrong)
        return value


def Range(low: float, high: float, open_low: bool = False) -> Interval:  # noqa: N802
    """Return bounds of a number: from `low`, included unless `open_low`, to `high`."""
    return Interval(gt=low, le=high) if open_low else Interval(ge=low, le=high)


def make(kind: type[T], value: Any, where: Where = "", name: str = "") -> T:
    """Return `value`, of TOML or JSON, as the type `kind`: a dataclass from its table.

    Errors call it `name`, and say where it is from. Raises `UserError` for a wrong type, a value
    out of bounds, an unknown key and a missing one.
    """
    try:
        # JSON, since pydantic takes a table for a dataclass there even where it is strict.
        text = json.dumps(value, default=lambda other: {"": str(other)})  # a date of TOML
        reader: TypeAdapter[T] = adapter(cast(Any, kind))
        return reader.validate_json(text, strict=True, extra="forbid")
    except (RecursionError, ValueError, TypeError) as error:
        raise explained(error, value, where, name) from None


@functools.cache
def adapter(kind: Any) -> "TypeAdapter[Any]":
    """Return pydantic's reader of a type."""
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def explained(error: Exception, value: Any, where: Where, name: str) -> UserError:
    """Return the first of pydantic's errors in one line: the setting, what is wrong, where from.

    Elements of lists are called as the list is. Of a value that may be of several types the errors
    under each are one.
    """
    if not hasattr(error, "errors"):  # not pydantic's: nested too deeply, or of too many digits
        source = where if isinstance(where, str) else where(name)
        if isinstance(value, dict) and not name:
            name = " or ".join(each for each in value if isinstance(value[each], int))
        return UserError(f"{name or 'a value'} cannot be read ({source or error})")
    errors: list[Any] = error.errors(include_url=False)
    first = next((each for each in errors if each["type"].startswith("unexpected")), errors[0])
    keys, got, inside = [name] if name else [], value, 0
    of_key = 2 if first["loc"][-1:] == ("[key]",) else 0  # of a table with names of the user's
    for step in first["loc"][: len(first["loc"]) - of_key]:
        if isinstance(got, dict) and step in got:
            keys.append(str(step))
        elif not (isinstance(got, list) and isinstance(step, int) and step < len(got)):
            if isinstance(got, dict) and first["type"] == "missing":
                keys.append(str(step))
            break  # what follows is of pydantic: a type, or what is not there
        got, inside = got[step], inside + 1
    setting = ".".join(keys)
    source = where if isinstance(where, str) else where(setting)
    from_there = f" ({source})" if source else ""
    if first["type"].startswith("unexpected"):
        return UserError(f"unknown key {setting}{from_there}")
    if first["type"] == "value_error":
        return UserError(f"{setting} {first['ctx']['error']}{from_there}".strip())
    if first["type"] == "missing" and not isinstance(got, list):
        return UserError(f"{setting} is missing{from_there}")
    if first["type"] in ("missing", "too_long"):
        wanted = first.get("ctx", {}).get("max_length") or 1 + max(
            each["loc"][-1] for each in errors if isinstance(each["loc"][-1], int)
        )
        return UserError(f"{setting} must be {wanted} values, got {got!r}{from_there}")
    # Under each type of a union there is one, whose place ends with a name of the type.
    alike = [each for each in errors if each["loc"][:inside] == first["loc"][:inside]]
    texts = [plain_words(each["msg"]) for each in (alike if first["loc"][inside:] else [first])]
    problem = " or ".join(
        dict.fromkeys([texts[0], *(each.removeprefix(MUST) for each in texts[1:])])
    )
    return UserError(f"{setting} {problem}, got {got!r:.200}{from_there}".strip())


def plain_words(text: str) -> str:
    """Return pydantic's text of an error in words that users of TOML know."""
    text = text.partition(", unable to")[0]
    for theirs, ours in IN_WORDS.items():
        text = text.replace(theirs, ours)
    return re.sub(r"\d{4,}", lambda number: f"{int(number[0]):,}", text)


def nearest(name: str, known: Iterable[str], likeness: float = LIKENESS) -> str:
    """Return the name among those `known` that `name` was meant to be; "" if none is like it.

    Of dotted names it is the first with the same last part, in any section, else the likest of the
    same section.
    """
    bare, name = {plainly(each): each for each in reversed([*known])}, plainly(name)
    section, _, key = name.rpartition(".")
    last = {each.rpartition(".")[2]: full for each, full in bare.items()}
    if key in last and name not in bare:
        return last[key]
    inside = {each: bare[each] for each in bare if section and each.rpartition(".")[0] == section}
    if inside:
        bare, name = {each.rpartition(".")[2]: full for each, full in inside.items()}, key
    begun = [each for each in bare if len(name) > 2 and each.startswith(name)]
    if len(begun) == 1:
        return bare[begun[0]]
    return next((bare[each] for each in difflib.get_close_matches(name, bare, 1, likeness)), "")


def plainly(name: str) -> str:
    """Return a name without what spellings differ in: case, - and _."""
    return name.replace("-", "_").strip("_").lower()


def question(near: str, before: str = "") -> str:
    """Return the question whether `near` was meant, after `before`; "" if there is nothing near."""
    return f"{before}did you mean {near}?" if near else ""


def meant(name: str, known: Iterable[str], otherwise: str = "") -> str:
    """Return the question whether another name was meant, if one is like it, then `otherwise`."""
    near = nearest(name, known)
    return f"did you mean {near}? {otherwise[:1].upper()}{otherwise[1:]}" if near else otherwise


def bare_type(hint: Any) -> Any:
    """Return the `X` of the types `X | None` and `X`, without bounds and marks."""
    if typing.get_origin(hint) is Annotated:
        hint = hint.__origin__
    if typing.get_origin(hint) in UNIONS:
        kinds = [each for each in typing.get_args(hint) if each is not type(None)]
        return bare_type(kinds[0]) if len(kinds) == 1 else hint
    return hint


def table_in(hint: Any) -> type | None:
    """Return the dataclass of a field that is a section or an array of tables; None of others."""
    hint = bare_type(hint)
    inner = bare_type(typing.get_args(hint)[0]) if typing.get_origin(hint) is list else hint
    return inner if isinstance(inner, type) and dataclasses.is_dataclass(inner) else None


def form_of(hint: Any) -> str:
    """Return how a value of a type looks, as TOML and the command line spell it."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        tables = [mark.table for mark in hint.__metadata__ if isinstance(mark, KeyOf)]
        return "{" + ",".join(tables[0]) + "}" if tables else form_of(hint.__origin__)
    if origin is Literal:
        return "{" + ",".join(map(str, args)) + "}"
    if origin in UNIONS:
        values = [form_of(each) for each in args if each is not type(None)]
        return "|".join(values).replace("}|{", ",")
    if origin is list or ... in args:
        return f"{form_of(args[0])} ..."
    if origin is tuple:
        return " ".join(form_of(each) for each in args)
    names = {bool: "{true,false}", int: "INT", float: "FLOAT"}
    return names.get(hint, "PATH" if hint in (pathlib.Path, pathlib.PurePath) else "TEXT")


def read_words(words: list[str], hint: Any, name: str, where: str = "") -> Any:
    """Return the value of the words after the option `name`, as TOML would have it.

    `none` stands for no value, where the type has that. Lists are read word by word, and commas
    part their numbers. Raises `UserError`.
    """
    kind, types_of = bare_type(hint), typing.get_args(unmarked(hint))
    if [each.lower() for each in words] == ["none"] and type(None) in types_of:
        return None
    if typing.get_origin(kind) in (list, tuple):
        element = typing.get_args(kind)[0]
        if bare_type(element) in (int, float):
            words = [each for word in words for each in word.split(",")]
        return [read_word(word, element, name, where) for word in words]
    if not words:
        raise UserError(f"{name} needs a value: {form_of(hint)}")
    return read_word(words[0], hint, name, where)


def unmarked(hint: Any) -> Any:
    """Return a type without its bounds and marks."""
    return hint.__origin__ if typing.get_origin(hint) is Annotated else hint


def read_word(word: str, hint: Any, name: str, where: str) -> Any:
    """Return the value of a word by pydantic: a switch is `true` or `false`, 1e3 a whole number.

    Raises `UserError`.
    """
    try:
        word.encode()
    except UnicodeEncodeError:
        raise UserError(f"{name} must be Unicode text, got {word!r}") from None
    kind = bare_type(hint)
    kinds = typing.get_args(kind) if typing.get_origin(kind) in UNIONS else (kind,)
    if bool in kinds:
        if word.lower() in ("true", "false"):
            return word.lower() == "true"
        if len(kinds) == 1:
            from_there = f" ({where})" if where else ""
            raise UserError(f"{name} must be true or false, got {word!r}{from_there}")
        hint = next(each for each in kinds if each is not bool)
    if int in kinds and re.fullmatch(r"[+-]?[\d.]+e\+?\d{1,2}", word, re.IGNORECASE):
        word = str(int(float(word))) if float(word).is_integer() else word
    try:
        return adapter(hint).validate_strings(word)
    except ValueError as error:
        raise explained(error, word, where, name) from None


def whole_number(text: str) -> int | str:
    """Return the number in `text`, or `text` if it is not a number."""
    return int(text) if re.fullmatch(r"[+-]?[0-9]{1,4000}", text) else text


def is_text(value: Any) -> bool:
    """Return whether a value is a string that UTF-8 can write, without a NUL character."""
    try:
        return b"\0" not in value.encode()
    except (UnicodeEncodeError, AttributeError):  # also what is no string
        return False


def parse_json(text: str) -> dict[str, Any]:
    """Return a JSON text's object. Raises `ValueError` if it has none."""
    try:
        value = json.loads(text)
    except RecursionError:
        value = None
    if not isinstance(value, dict):
        raise ValueError("it is no JSON object")
    return value


def as_path(value: Any, name: str) -> pathlib.Path:
    """Return a path that Python code gives. Raises `UserError` if it is not a path."""
    path = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(path, str):
        raise UserError(f"{name} must be a path, got {value!r:.80}")
    if wrong := name_problem(path) if path else "it is empty":
        raise UserError(f"{name}: {path!r:.80} cannot be a path ({wrong})")
    return pathlib.Path(path)
