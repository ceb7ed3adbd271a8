"""From a TOML file and `--section.key value` overrides to a checked `Config`, and back to a file."""

import dataclasses
import difflib
import types
import typing
from pathlib import Path
from typing import Any, Literal

import tomli
import tomli_w
import tyro

from torchmars.config import Config
from torchmars.errors import UserError


def load_config(args: list[str], prog: str) -> Config:
    """The resolved config of a command line `[CONFIG.toml] [--section.key value ...]`.

    `--help` prints every field with its default and exits. Raises `UserError` for anything the user got wrong.
    """
    if "-h" in args or "--help" in args:
        print_help(prog)
    files = args[:1] if args and not args[0].startswith("--") else []
    config = Config()
    for file in files:
        fill(config, read_toml(Path(file)), f"in {file}")
    fill(config, parse_overrides(args[len(files):]), "on the command line")
    config.resolve()
    return config


def config_from_tables(tables: dict[str, Any], source: str) -> Config:
    """The resolved config of a table per section, such as a checkpoint keeps; `source` says in errors where it is from."""
    config = Config()
    fill(config, {section: {key: value for key, value in table.items() if value is not None}
                  for section, table in tables.items()}, source)
    config.resolve()
    return config


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file. Raises `UserError` where it is missing or no TOML."""
    try:
        return tomli.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read the config {path}: {error.strerror}") from None
    except (tomli.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid TOML: {error}") from None


def parse_overrides(args: list[str]) -> dict[str, dict[str, Any]]:
    """`--section.key value ...` and `--section.key=value` as a table of words for each section."""
    tables: dict[str, dict[str, Any]] = {}
    position = 0
    while position < len(args):
        option, equals, value = args[position].partition("=")
        position += 1
        section, dot, key = option.removeprefix("--").replace("-", "_").partition(".")
        if not (option.startswith("--") and dot and key):
            raise UserError(f"cannot read the argument {option!r}: overrides look like --section.key value, see --help")
        words = Words([value] if equals else [])
        while not equals and position < len(args) and not args[position].startswith("--"):
            words.append(args[position])
            position += 1
        tables.setdefault(section, {})[key] = words
    return tables


class Words(list[str]):
    """What the command line gives for one option: words that are not yet of the field's type. None of them: a flag, true."""


def fill(config: Config, tables: dict[str, Any], source: str) -> None:
    """Set the fields that `tables` names. Raises `UserError` for unknown names and wrong types."""
    for section_name, table in tables.items():
        section = getattr(config, known(section_name, config, "section", source))
        if not isinstance(table, dict):
            raise UserError(f"{section_name} {source} must be a table [{section_name}], got {table!r}")
        hints = typing.get_type_hints(type(section))
        for key, value in table.items():
            known(key, section, f"key {section_name}.", source)
            setattr(section, key, convert(value, hints[key], f"{section_name}.{key}"))


def known(name: str, owner: object, kind: str, source: str) -> str:
    """`name` if `owner` has such a field; else a `UserError` that names the nearest one."""
    names = [field.name for field in dataclasses.fields(owner)]
    if name in names:
        return name
    prefix = kind[4:] if kind.startswith("key ") else ""
    nearest = difflib.get_close_matches(name, names, n=1, cutoff=0)[0]
    raise UserError(f"unknown {kind.split()[0]} {prefix}{name} {source}: did you mean {prefix}{nearest}?")


def convert(value: Any, hint: Any, name: str) -> Any:
    """`value`, from TOML or from the command line's words, as the field's type."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):  # T | None
        if value == ["None"]:
            return None
        hint = next(option for option in typing.get_args(hint) if option is not type(None))
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if isinstance(value, Words):
        if not value and hint is not bool:
            raise UserError(f"{name} needs a value: it must be {describe(hint)}")
        each = args[0] if origin in (list, tuple) else hint
        words = [read_word(word, each) for word in value or ["true"]]
        value = words if origin in (list, tuple) or len(words) > 1 else words[0]
    if origin is list and isinstance(value, list):
        return [convert(item, args[0], name) for item in value]
    if origin is tuple and isinstance(value, (list, tuple)) and len(value) == len(args):
        return tuple(convert(item, each, name) for item, each in zip(value, args))
    if origin is Literal and value in args:
        return value
    if hint is float and type(value) is int:
        return float(value)
    if origin is None and type(value) is hint:
        return value
    raise UserError(f"{name} must be {describe(hint)}, got {value!r}")


def read_word(word: str, hint: Any) -> Any:
    """A word of the command line as the bool or number that the field's type wants; the word itself where it is none."""
    if hint is bool:
        return {"true": True, "false": False}.get(word.lower(), word)
    try:
        return hint(word) if hint in (int, float) else word
    except ValueError:
        return word


def describe(hint: Any) -> str:
    """A type as a user would say it."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return "one of " + ", ".join(f'"{choice}"' for choice in args)
    if origin is tuple:
        return f"{len(args)} numbers"
    if origin is list:
        return "a list of strings"
    return {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}[hint]


def write_config(config: Config, path: Path) -> None:
    """Write `config` as TOML; fields that are None are left out, so that reading it gives the same config."""
    tables = {section: {key: list(value) if isinstance(value, tuple) else value
                        for key, value in table.items() if value is not None}
              for section, table in dataclasses.asdict(config).items()}
    path.write_text(tomli_w.dumps(tables), encoding="utf-8")


def print_help(prog: str) -> None:
    """Print every section and field with its docstring and default, then exit with 0."""
    tyro.cli(Config, args=["--help"], prog=f"{prog} CONFIG.toml", use_underscores=True,
             description="Settings come from the TOML file; --section.key value overrides one of them.",
             config=(tyro.conf.FlagConversionOff,))
