"""Values of TOML, JSON and the command line, checked by pydantic against what dataclasses declare.

A field declares its type and its bounds: `Annotated[int, Interval(ge=1, le=1_000)]`. Nothing is
converted but a whole number where a float is declared. The first error becomes one line.
"""

import contextlib
import dataclasses
import difflib
import functools
import json
import pathlib
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, cast

from torchmars.core.errors import UserError
from torchmars.core.places import place, place_problem

if TYPE_CHECKING:
    from pydantic import TypeAdapter

T = TypeVar("T")

UNIONS = (typing.Union, types.UnionType)


@dataclasses.dataclass(frozen=True)
class Interval:
    """Bounds of a number. The package annotated_types has it too, and makes --help much later."""

    ge: float | None = None
    le: float | None = None
    gt: float | None = None
    lt: float | None = None

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> Any:
        return handler(source) | {
            name: each for name, each in vars(self).items() if each is not None
        }


class Bounds:
    """Bounds that a field declares beside its type: `check` raises `ValueError` with them.

    As pydantic's `AfterValidator`, which takes as long to import as all of our settings.
    """

    check: Callable[[Any], Any]

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> Any:
        after = {"type": "no-info", "function": self.check}
        return {"type": "function-after", "function": after, "schema": handler(source)}


class Name(Bounds):
    """Bounds of a text that names one file or folder, without the folders above it."""

    def check(self, value: str) -> str:
        wrong = value in ("", ".", "..") or "/" in value or not value.isprintable()
        if wrong or len(value.encode()) > 200:
            raise ValueError(f"must be one name without /, of at most 200 bytes, got {value!r}")
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
        if wrong or not value:
            raise ValueError(wrong or "must not be empty")
        return value


def make(kind: type[T], value: Any, where: str = "", name: str = "") -> T:
    """Return `value`, of TOML or JSON, as the type `kind`: a dataclass from its table.

    Errors call it `name`, and say `where` it is from. Raises `UserError` for a wrong type, a value
    out of bounds, an unknown key and a missing one.
    """
    try:
        # JSON, since pydantic takes a table for a dataclass there even where it is strict.
        given = str(value) if isinstance(value, pathlib.PurePath) else value
        text = json.dumps(given, default=lambda other: {"": str(other)})  # a date of TOML
        return cast(T, adapter(cast(Any, kind)).validate_json(text, strict=True, extra="forbid"))
    except ValueError as error:
        raise explained(error, value, where, name) from None


@functools.cache
def adapter(kind: Any) -> "TypeAdapter[Any]":
    """Return pydantic's reader of a type."""
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def explained(error: ValueError, value: Any, where: str, name: str) -> UserError:
    """Return the first of pydantic's errors in one line: the setting, what is wrong, where from.

    Elements of lists are called as the list is. Of a value that may be of several types the errors
    under each are one.
    """
    # No error of pydantic's where a number has too many digits.
    unread = {"type": "value_error", "loc": (), "msg": f"cannot be read: {error}"}
    errors: list[Any] = getattr(error, "errors", lambda **_: [unread])(include_url=False)
    kind, place = errors[0]["type"], errors[0]["loc"]
    keys, got = [name], value
    for step in place:
        try:
            got = got[step]
        except (LookupError, TypeError):  # what follows is of pydantic: a type, or what is missing
            break
        keys.append(step if isinstance(step, str) else "")
    depth = len(keys) - 1
    alike = [each for each in errors if each["loc"][:depth] == place[:depth]]
    said = " or ".join(dict.fromkeys(each["msg"] for each in alike))
    said = said.replace("Value error, ", "").replace("Input should be", "must be")
    if kind == "missing" and isinstance(got, list):
        said = f"needs {alike[-1]['loc'][-1] + 1} values, got {got!r}"
    elif kind == "missing":
        keys, said = [*keys, str(place[-1])], "is missing"
    elif kind != "value_error":
        said = f"{said}, got {got!r:.200}"
    setting = ".".join(filter(None, keys))
    return UserError(f"{setting} {said} ({where})" if where else f"{setting} {said}")


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the name among those `known` that `name` was meant to be; "" if none is like it.

    Of dotted names it is the first with the same last part, in any section, else of the same
    section the only one that begins so, or the likest. Less like it than 0.65 of 1 would mislead.
    """
    plain = {each.replace("-", "_").lower(): each for each in reversed([*known])}
    section, _, key = name.replace("-", "_").lower().rpartition(".")
    last = {each.rpartition(".")[2]: full for each, full in plain.items()}
    if key in last:
        return last[key]
    inside = [each for each in plain if section and each.rpartition(".")[0] == section]
    beside = {each.rpartition(".")[2]: plain[each] for each in inside} or plain
    begun = [each for each in beside if each.startswith(key)]
    found = begun if len(begun) == 1 else difflib.get_close_matches(key, beside, 1, 0.65)
    return beside[found[0]] if found else ""


def meant(name: str, known: Iterable[str], otherwise: str = "", before: str = "") -> str:
    """Return the question whether another name was meant, if one is like it, then `otherwise`."""
    near = nearest(name, known)
    more = f" {otherwise[:1].upper()}{otherwise[1:]}" if otherwise else ""
    return f"{before}did you mean {near}?{more}" if near else otherwise


def kinds_of(hint: Any) -> list[Any]:
    """Return the types of which a value may be, without bounds and marks, in their order."""
    if typing.get_origin(hint) is Annotated:
        return kinds_of(hint.__origin__)
    if typing.get_origin(hint) in UNIONS:
        return [kind for each in typing.get_args(hint) for kind in kinds_of(each)]
    return [hint]


def kind_of(hint: Any) -> Any:
    """Return the `X` of the types `X | None` and `X`, without bounds and marks."""
    kinds = [each for each in kinds_of(hint) if each is not type(None)]
    return kinds[0] if len(kinds) == 1 else hint


def table_in(hint: Any) -> type | None:
    """Return the dataclass of a field that is a section or an array of tables; None of others."""
    kind = kind_of(hint)
    kind = kind_of(typing.get_args(kind)[0]) if typing.get_origin(kind) is list else kind
    return kind if isinstance(kind, type) and dataclasses.is_dataclass(kind) else None


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


def read_words(words: list[str], hint: Any, name: str) -> Any:
    """Return the words after the option `name` as the value that TOML would have: see `make`.

    `none` stands for no value, where the type has that. Lists are read word by word, and commas
    part their numbers. A `Path` is local, a `PurePath` may also be in a store. Raises `UserError`.
    """
    kind, kinds = kind_of(hint), kinds_of(hint)
    if [each.lower() for each in words] == ["none"] and type(None) in kinds:
        return None
    if typing.get_origin(kind) in (list, tuple):
        kinds = kinds_of(typing.get_args(kind)[0])
        if {int, float} & {*kinds}:
            words = [each for word in words for each in word.split(",")]
        return [read_word(word, *kinds, name=name) for word in words]
    return read_word(words[0], *kinds, name=name)


def read_word(word: str, *kinds: Any, name: str = "") -> Any:
    """Return a word as a number, a path or a switch where it may be one of these, or as it is."""
    if kinds[0] in (pathlib.Path, pathlib.PurePath):
        return place(word, name, stores=kinds[0] is pathlib.PurePath)
    if bool in kinds and word.lower() in ("true", "false"):
        return word.lower() == "true"
    if int in kinds or float in kinds:
        with contextlib.suppress(ValueError):
            return int(word)
        with contextlib.suppress(ValueError):
            number = float(word)
            return int(number) if number.is_integer() else number  # 1e3 and 1000.0 are whole
    return word


def is_text(value: Any) -> bool:
    """Return whether a value is a string that UTF-8 can write, without a NUL character."""
    return isinstance(value, str) and not re.search(r"[\x00\ud800-\udfff]", value)


def parse_json(text: str) -> dict[str, Any]:
    """Return a JSON text's object. Raises `ValueError` if it has none."""
    with contextlib.suppress(RecursionError):
        if isinstance(value := json.loads(text), dict):
            return value
    raise ValueError("it is no JSON object")
