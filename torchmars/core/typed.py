"""Values of the types and bounds that a dataclass declares, from TOML, JSON or a command line.

pydantic checks types and bounds, and strictly: nothing is converted but a whole number where a
float is declared. Here are the words of its errors, each in one line.
"""

import dataclasses
import difflib
import functools
import json
import pathlib
import re
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from datetime import date, time
from types import NoneType
from typing import Annotated, Any, Literal, TypeVar, cast

from pydantic import TypeAdapter, ValidationError

from torchmars.core.errors import UserError

T = TypeVar("T")
Path = Sequence[int | str]  # the keys and indices that lead to a value
# Tables within tables. Our files have fewer levels; thousands would exhaust Python's stack.
LEVELS = 16
# Of a misspelt name, from 0 to 1; below it a hint misleads. Names of settings are more alike.
LIKENESS, OF_SETTING = 0.6, 0.73
LARGEST = 10**1000  # Python refuses to print whole numbers of some thousand digits


def make(kind: type[T], value: Any, source: Callable[[str], str] | str = "", name: str = "") -> T:
    """Return `value`, of TOML or JSON, as the type `kind`: a dataclass from its table.

    Errors call it `name`. They say where it comes from: `source`, which may be a function of a
    field's name. Raises `UserError` for a wrong type, a value out of bounds, an unknown key and a
    missing one.
    """
    try:
        for path, problem in unprintable(value):
            raise mistake(path, problem, source, name)
        # JSON, since pydantic takes a table for a dataclass there even where it is strict.
        text = json.dumps(value, default=lambda other: {"": str(other)})  # a date of TOML
        reader: TypeAdapter[T] = adapter(cast(Any, kind))
        return reader.validate_json(text, strict=True, extra="forbid")
    except ValidationError as error:
        errors = error.errors(include_url=False)
    unknown = [each for each in errors if each["type"] == "unexpected_keyword_argument"]
    first = (unknown or errors)[0]
    path = first["loc"][:-2] if first["loc"][-1:] == ("[key]",) else first["loc"]
    if first["type"] == "missing" and isinstance(path[-1], str):
        raise mistake(path, "is missing", source, name)
    if first["type"] == "value_error":
        raise mistake(path, str(first["ctx"]["error"]), source, name)
    path = path[:-1] if first["type"] == "missing" else path
    got = functools.reduce(lambda owner, step: owner[step], path, value)
    if unknown:
        raise unknown_key(kind, path, got, source)
    hint = without_none(hint_at(kind, path))
    choices = [*map(str, typing.get_args(hint))] if typing.get_origin(hint) is Literal else []
    near = f": {meant(str(got), choices)}".rstrip(": ")
    if isinstance(got, str) and hint in (int, float, bool) and read_word(got, hint) != got:
        near = ": write it without quotes"
    raise mistake(path, f"must be {describe(hint)}, got {got!r}{near}", source, name)


@functools.cache
def adapter(kind: Any) -> TypeAdapter[Any]:
    """Return pydantic's reader of a type."""
    return TypeAdapter(kind)


def unprintable(value: Any, path: tuple[int | str, ...] = ()) -> Iterator[tuple[Path, str]]:
    """Yield the texts and numbers that files and messages cannot hold, and the requirement."""
    if len(path) > LEVELS:
        yield path[:3], f"must not be nested deeper than {LEVELS} levels"
    elif isinstance(value, dict):
        for key, item in value.items():
            if not is_text(key):
                yield path, f"must have names that are Unicode text, got {key!r}"
            yield from unprintable(item, (*path, key))
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from unprintable(item, (*path, index))
    elif isinstance(value, str) and not is_text(value):
        yield path, f"must be Unicode text without a NUL character, got {value!r}"
    elif isinstance(value, int) and abs(value) > LARGEST:
        yield path, "must be a number of at most 1,000 digits"
    elif not isinstance(value, (int, float, str, date, time, NoneType)):  # what Python alone has
        yield path, f"must be plain text, number, true, false, list or table, got {value!r:.80}"


def mistake(path: Path, problem: str, source: Callable[[str], str] | str, name: str) -> UserError:
    """Return the error of the value at `path`. Elements of lists are called as the list is."""
    key = ".".join([*([name] if name else []), *(step for step in path if isinstance(step, str))])
    where = source if isinstance(source, str) else source(key)
    return UserError(f"{key} {problem}{where and f' ({where})'}".strip())


def unknown_key(kind: Any, path: Path, got: Any, source: Callable[[str], str] | str) -> UserError:
    """Return the error of a key that is not there, with the one that was meant, if any is like it.

    `got` is its value.
    """
    *above, key = path
    owner = [step for step in above if isinstance(step, str)]
    full = ".".join([*owner, str(key)])
    near = setting_meant(kind, above, str(key))
    section, _, name = near.rpartition(".")
    if section and not owner:  # a setting above all sections
        near = f"{name}, a setting of [{section}]"
    where = source if isinstance(source, str) else source(full)
    known = [each.name for each in dataclasses.fields(without_none(hint_at(kind, above)))]
    return UserError(
        f"unknown {'section' if isinstance(got, dict) and not owner else 'key'} {full}"
        f"{where and f' {where}'}: "
        + (question(near).strip() or f"it may be one of {', '.join(known)}")
    )


def setting_meant(kind: Any, above: Path, key: str) -> str:
    """Return the dotted name that `key`, which no field of the table `above` has, was meant to be.

    It is a setting, or a section, of the dataclass `kind`: "" if none is like it. A setting of
    another section is one only by its exact name.
    """
    owner = [step for step in above if isinstance(step, str)]
    known = [each.name for each in dataclasses.fields(without_none(hint_at(kind, above)))]
    if owner and (near := nearest(key, known, OF_SETTING)):
        return ".".join([*owner, near])
    settings = [*dotted_names(kind)]
    # Of two of one name the first: `n_layer` is the model's.
    alone = {each.rpartition(".")[2]: each for each in reversed(settings)}
    alone |= {each.replace(".", "_"): each for each in settings}  # training_steps
    if owner or spelled_plainly(key) in alone:
        return alone.get(spelled_plainly(key), "")
    alone |= {each: each for each in known}
    return alone.get(nearest(key, [*alone], OF_SETTING), "")


def dotted_names(kind: Any, above: str = "") -> Iterator[str]:
    """Yield the dotted names of the fields of a dataclass and of those within it."""
    for field, hint in typing.get_type_hints(kind).items():
        inner = without_none(hint)
        if dataclasses.is_dataclass(inner):
            yield from dotted_names(inner, f"{above}{field}.")
        else:
            yield above + field


def spelled_plainly(name: str) -> str:
    """Return a name without what spellings differ in: case, - and _."""
    return name.replace("-", "_").strip("_").lower()


def nearest(name: str, known: Sequence[str], likeness: float = LIKENESS) -> str:
    """Return the name among those `known` that `name` was meant to be; "" if none is like it.

    It is another spelling, one very like it, the only one of which it is a part, or else the most
    like it.
    """
    bare = {spelled_plainly(each): each for each in known}
    name = spelled_plainly(name)
    whole = [each for each in bare if each.startswith(name) or each.endswith(f"_{name}")]
    alone = len(whole) == 1 and len(name) > 2
    near = [name, *difflib.get_close_matches(name, bare, 1, max(likeness, 0.8))]
    near += [*(whole if alone else []), *difflib.get_close_matches(name, bare, 1, likeness)]
    return next((bare[each] for each in near if each in bare), "")


def meant(name: str, known: Sequence[str], otherwise: str = "") -> str:
    """Return the question whether another name was meant, if one is like it, then `otherwise`."""
    return question(nearest(name, known), otherwise)


def question(near: str, otherwise: str = "") -> str:
    """Return the question whether `near` was meant, unless it is "", and a space; `otherwise`."""
    if not near:
        return otherwise
    return f"did you mean {near}? {otherwise[:1].upper()}{otherwise[1:]}"


def hint_at(kind: Any, path: Path) -> Any:
    """Return the declared type of the value that `path` leads to in a `kind`, without its bounds.

    Raises `KeyError` if the path leads nowhere.
    """
    for step in path:
        kind = without_none(kind)
        args = typing.get_args(kind)
        if isinstance(step, int):
            kind = args[min(step, len(args) - 1)]
        elif typing.get_origin(kind) is dict:
            kind = args[1]
        elif dataclasses.is_dataclass(kind):
            kind = typing.get_type_hints(kind)[step]
        elif kind is Any:
            return Any
        else:
            raise KeyError(step)
    return kind


def without_none(hint: Any) -> Any:
    """Return the `X` of the types `X | None` and `X`, without bounds and marks."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        hint = next(each for each in typing.get_args(hint) if each is not type(None))
    return hint.__origin__ if typing.get_origin(hint) is Annotated else hint


def table_in(hint: Any) -> type | None:
    """Return the dataclass of a field that is a section or an array of tables; None of others."""
    hint = without_none(hint)
    inner = without_none(typing.get_args(hint)[0]) if typing.get_origin(hint) is list else hint
    return inner if isinstance(inner, type) and dataclasses.is_dataclass(inner) else None


def read_words(words: list[str], hint: Any, name: str) -> Any:
    """Return the value of the words after a command-line option, as TOML would have it.

    `hint` is the option's type. A bool without a word is true. What cannot be read as the type
    stays text, which `make` refuses. Raises `UserError` if another type has no word.
    """
    if words == ["None"] and type(None) in typing.get_args(hint):
        return None
    hint = without_none(hint)
    if not words and hint not in (bool, Any):  # `make` says that there is no such setting
        raise UserError(f"{name} needs a value: it must be {describe(hint)}")
    if typing.get_origin(hint) in (list, tuple):
        element = typing.get_args(hint)[0]
        if without_none(element) in (int, float):  # commas between numbers do too
            words = [each for word in words for each in word.split(",")]
        return [read_word(word, element) for word in words]
    values = [read_word(word, hint) for word in words or ["true"]]
    return values[0] if len(values) == 1 else values


def read_word(word: str, hint: Any) -> Any:
    """Return a word as the bool or number that `hint` asks for, otherwise unchanged.

    Of `Any` it is what it looks like.
    """
    if hint is Any:
        kinds = (bool, int, float)
        return next((each for kind in kinds if (each := read_word(word, kind)) != word), word)
    if hint is bool:
        return {"true": True, "false": False}.get(word.lower(), word)
    try:
        return hint(word) if hint in (int, float) else word
    except ValueError:
        return word


def whole_number(text: str) -> int | str:
    """Return the number in `text`, or `text` if it is not a number."""
    return int(text) if re.fullmatch(r"[+-]?[0-9]{1,4000}", text) else text


def describe(hint: Any) -> str:
    """Return a type as a user would say it."""
    hint = without_none(hint)
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return "one of " + ", ".join(f'"{choice}"' for choice in args)
    if origin is tuple:
        return f"{len(args)} numbers"
    if origin is list:
        kinds = {str: "a list of strings", float: "a list of numbers"}
        return kinds.get(without_none(args[0]), "an array of tables")
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}
    names |= dict.fromkeys((pathlib.Path, pathlib.PurePath), "the path of a file or folder")
    return names.get(hint, "a table")


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
