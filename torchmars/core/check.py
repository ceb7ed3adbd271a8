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

from torchmars.core.errors import UserError
from torchmars.core.places import place, place_problem

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler, TypeAdapter
    from pydantic_core import CoreSchema

T = TypeVar("T")
Where = Callable[[str], str] | str  # where values are from; a function of a setting's name

UNIONS = (typing.Union, types.UnionType)
CONTROL = re.compile(r"[\x00-\x1f\x7f]")
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


@dataclasses.dataclass(frozen=True)
class Interval:
    """Bounds of a number. The package annotated_types has it too, and makes --help much later."""

    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None

    def __get_pydantic_core_schema__(
        self, source: Any, handler: "GetCoreSchemaHandler"
    ) -> "CoreSchema":
        given = {name: bound for name, bound in vars(self).items() if bound is not None}
        return cast(Any, {**handler(source), **given})


def Range(low: float, high: float, open_low: bool = False) -> Interval:  # noqa: N802
    """Return bounds of a number: from `low`, included unless `open_low`, to `high`."""
    return Interval(gt=low, le=high) if open_low else Interval(ge=low, le=high)


class Bounds:
    """Bounds that a field declares beside its type: `check` raises `ValueError` with them.

    As pydantic's `AfterValidator`, which takes as long to import as all of our settings.
    """

    check: Callable[[Any], Any]

    def __get_pydantic_core_schema__(
        self, source: Any, handler: "GetCoreSchemaHandler"
    ) -> "CoreSchema":
        after: Any = {"type": "no-info", "function": self.check}
        return {"type": "function-after", "function": after, "schema": handler(source)}


@dataclasses.dataclass(frozen=True)
class Name(Bounds):
    """Bounds of a text that names one `kind`, "file" or "folder", without the folders above it."""

    kind: str

    def check(self, value: str) -> str:
        wrong = value in ("", ".", "..") or "/" in value or CONTROL.search(value)
        if wrong or len(value.encode()) > 200:
            raise ValueError(f"must be one {self.kind} name of at most 200 bytes, got {value!r}")
        return value


@dataclasses.dataclass(frozen=True, eq=False)
class KeyOf(Bounds):
    """Bounds of a text that is a key of a table. Plugins may add to the table."""

    table: Mapping[str, Any]

    def check(self, value: str) -> str:
        if value not in self.table:
            raise ValueError(
                f"must be one of {', '.join(self.table)}, or a plugin's (--plugins), got {value!r}"
                + meant(value, self.table, before=": ")
            )
        return value


@dataclasses.dataclass(frozen=True)
class Place(Bounds):
    """Bounds of the path of a file or folder, with `stores` also of a store's: `place_problem`."""

    stores: bool = False
    pattern: bool = False

    def check(self, value: str) -> str:
        wrong = place_problem(value, self.stores, self.pattern)
        if not wrong and (CONTROL.search(value) or os.path.realpath(value or "/") == "/"):
            wrong = f"must be the path of a file or folder, not empty and not /, got {value!r}"
        if wrong:
            raise ValueError(wrong)
        return value


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
    # Not pydantic's where a value is nested too deeply, or a number has too many digits.
    errors: list[Any] = getattr(error, "errors", lambda **_: [])(include_url=False)
    unread: dict[str, Any] = {"type": "", "msg": f"cannot be read: {error}", "loc": ()}
    first = errors[0] if errors else unread
    first = next((each for each in errors if each["type"].startswith("unexpected")), first)
    kind, keys, got, inside = first["type"], [name] if name else [], value, 0
    of_key = -2 if first["loc"][-1:] == ("[key]",) else None  # of a table with names of the user's
    for step in first["loc"][:of_key]:
        of_list = isinstance(got, list) and isinstance(step, int) and step < len(got)
        if not of_list and not (isinstance(got, dict) and step in got):
            break  # what follows is of pydantic: a type, or what is not there
        keys += [] if of_list else [str(step)]
        got, inside = got[step], inside + 1
    absent = kind == "missing" and not isinstance(got, list)
    setting = ".".join([*keys, *(map(str, first["loc"][inside:]) if absent else [])])
    source = where if isinstance(where, str) else where(setting)
    if kind.startswith("unexpected"):
        said = f"unknown key {setting}"
    elif kind == "value_error":
        said = f"{setting} {first['ctx']['error']}"
    elif absent or not errors or kind == "json_invalid":  # of half a pair of UTF-16
        said = f"{setting or 'a value'} {'is missing' if absent else first['msg']}"
    elif kind in ("missing", "too_long"):  # of a tuple
        most = max((each["loc"][-1] for each in errors if each["type"] == "missing"), default=0)
        wanted = first.get("ctx", {}).get("max_length") or 1 + most
        said = f"{setting} must be {wanted} values, got {got!r}"
    else:
        # Under each type of a union there is one, whose place ends with a name of the type.
        alike = [each for each in errors if each["loc"][:inside] == first["loc"][:inside]]
        texts = [plain_words(each["msg"]) for each in (alike if first["loc"][inside:] else [first])]
        others = (each.removeprefix("must be ") for each in texts[1:])
        said = f"{setting} {' or '.join(dict.fromkeys([texts[0], *others]))}, got {got!r:.200}"
    return UserError(f"{said} ({source})" if source else said)


def plain_words(text: str) -> str:
    """Return pydantic's text of an error in words that users of TOML know."""
    text = text.partition(", unable to")[0]
    for theirs, ours in IN_WORDS.items():
        text = text.replace(theirs, ours)
    return re.sub(r"\d{4,}", lambda number: f"{int(number[0]):,}", text)


def nearest(name: str, known: Iterable[str], likeness: float = 0.65) -> str:
    """Return the name among those `known` that `name` was meant to be; "" if none is like it.

    Of dotted names it is the first with the same last part, in any section, else the likest of the
    same section. Below a `likeness` from 0 to 1 a hint would mislead.
    """
    plain = {plainly(each): each for each in reversed([*known])}
    name = plainly(name)
    section, _, key = name.rpartition(".")
    last = {each.rpartition(".")[2]: full for each, full in plain.items()}
    if key in last and name not in plain:
        return last[key]
    if inside := {each for each in plain if section and each.rpartition(".")[0] == section}:
        plain, name = {each.rpartition(".")[2]: plain[each] for each in inside}, key
    begun = [each for each in plain if len(name) > 2 and each.startswith(name)]
    found = begun if len(begun) == 1 else difflib.get_close_matches(name, plain, 1, likeness)
    return plain[found[0]] if found else ""


def plainly(name: str) -> str:
    """Return a name without what spellings differ in: case, - and _."""
    return name.replace("-", "_").strip("_").lower()


def meant(name: str, known: Iterable[str], otherwise: str = "", before: str = "") -> str:
    """Return the question whether another name was meant, if one is like it, then `otherwise`."""
    near = nearest(name, known)
    more = f" {otherwise[:1].upper()}{otherwise[1:]}" if otherwise else ""
    return f"{before}did you mean {near}?{more}" if near else otherwise


def unmarked(hint: Any) -> Any:
    """Return a type without its bounds and marks."""
    return hint.__origin__ if typing.get_origin(hint) is Annotated else hint


def bare_type(hint: Any) -> Any:
    """Return the `X` of the types `X | None` and `X`, without bounds and marks."""
    hint = unmarked(hint)
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
    kind = bare_type(hint)
    if [each.lower() for each in words] == ["none"] and type(None) in typing.get_args(
        unmarked(hint)
    ):
        return None
    if typing.get_origin(kind) in (list, tuple):
        element = typing.get_args(kind)[0]
        if bare_type(element) in (int, float):
            words = [each for word in words for each in word.split(",")]
        return [read_word(word, element, name, where) for word in words]
    if not words:
        raise UserError(f"{name} needs a value: {form_of(hint)}")
    return read_word(words[0], hint, name, where)


def read_word(word: str, hint: Any, name: str, where: str) -> Any:
    """Return the value of a word by pydantic: a switch is `true` or `false`, 1e3 a whole number.

    A `Path` is local, a `PurePath` may also be in a store. Raises `UserError`.
    """
    if not is_text(word):
        raise UserError(f"{name} must be Unicode text, got {word!r}")
    kind = bare_type(hint)
    if kind in (pathlib.Path, pathlib.PurePath):
        found = place(word, name, stores=kind is pathlib.PurePath)
        if max(len(part.encode()) for part in (*found.parts, "")) > 255 or len(word) > 4000:
            raise UserError(f"{name}: {word:.80}... is longer than a path can be")
        return found
    kinds = typing.get_args(kind) if typing.get_origin(kind) in UNIONS else (kind,)
    if bool in kinds:
        if word.lower() in ("true", "false"):
            return word.lower() == "true"
        if len(kinds) == 1:
            return make(kind, word, where, name)  # pydantic would take yes, and 1
        hint = next(each for each in kinds if each is not bool)
    if int in kinds and re.fullmatch(r"[+-]?\d+\.?\d*e\+?\d{1,2}", word, re.I):
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
    if not isinstance(path, str) or not path or not is_text(path):
        raise UserError(f"{name} must be a path, got {value!r:.80}")
    return pathlib.Path(path)
