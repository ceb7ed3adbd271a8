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
    fill(config, without_none(tables), source)
    config.resolve()
    return config


def without_none(value: Any) -> Any:
    """Nested tables without the keys that are None and without tables that are empty."""
    if isinstance(value, dict):
        kept = {key: without_none(item) for key, item in value.items() if item is not None}
        return {key: item for key, item in kept.items() if item != {}}
    return [without_none(item) for item in value] if isinstance(value, (list, tuple)) else value


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file. Raises `UserError` where it is missing or no TOML."""
    try:
        return tomli.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read the config {path}: {error.strerror}") from None
    except (tomli.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid TOML: {error}") from None


def parse_overrides(args: list[str]) -> dict[str, Any]:
    """`--section.key value ...` and `--section.key=value` as nested tables of words."""
    tables: dict[str, Any] = {}
    position = 0
    while position < len(args):
        option, equals, value = args[position].partition("=")
        position += 1
        *path, key = option.removeprefix("--").replace("-", "_").split(".")
        if not (option.startswith("--") and path and key):
            raise UserError(f"cannot read the argument {option!r}: overrides look like --section.key value, see --help")
        words = Words([value] if equals else [])
        while not equals and position < len(args) and not args[position].startswith("--"):
            words.append(args[position])
            position += 1
        table = tables
        for name in path:
            table = table.setdefault(name, {})
            if isinstance(table, Words):
                raise UserError(f"{option} cannot be given beside --{'.'.join(path)}: that is a table")
        table[key] = words
    return tables


def take_count(args: list[str], option: str, default: int, least: int = 1) -> tuple[list[str], int]:
    """Split `--ranks N`, or another such option, off a command line: the rest, and the number. Raises `UserError` for one below `least`."""
    if option not in args:
        return args, default
    place = args.index(option)
    if not args[place + 1:place + 2] or not args[place + 1].isdigit() or int(args[place + 1]) < least:
        raise UserError(f"{option} must be followed by a whole number of at least {least}")
    return args[:place] + args[place + 2:], int(args[place + 1])


class Words(list[str]):
    """What the command line gives for one option: words that are not yet of the field's type. None of them: a flag, true."""


def fill(owner: Any, tables: dict[str, Any], source: str, prefix: str = "") -> None:
    """Set the fields of a config, a section or a group that `tables` names. Raises `UserError` for unknown names and wrong types."""
    hints = typing.get_type_hints(type(owner))
    for key, value in tables.items():
        name = f"{prefix}{key}"
        if key not in hints or key not in owner.__dataclass_fields__:
            nearest = difflib.get_close_matches(key, owner.__dataclass_fields__, n=1, cutoff=0)[0]
            raise UserError(f"unknown {'key' if prefix else 'section'} {name} {source}: did you mean {prefix}{nearest}?")
        if dataclasses.is_dataclass(hints[key]):
            if not isinstance(value, dict):
                raise UserError(f"{name} {source} must be a table [{name}], got {value!r}")
            fill(getattr(owner, key), value, source, f"{name}.")
        else:
            setattr(owner, key, convert(value, hints[key], name, source))


def convert(value: Any, hint: Any, name: str, source: str) -> Any:
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
    if dataclasses.is_dataclass(hint) and isinstance(value, dict):
        table = hint()
        fill(table, value, source, f"{name}.")
        return table
    if origin is list and isinstance(value, list):
        return [convert(item, args[0], name, source) for item in value]
    if origin is tuple and isinstance(value, (list, tuple)) and len(value) == len(args):
        return tuple(convert(item, each, name, source) for item, each in zip(value, args))
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
        return "a list of strings" if args[0] is str else "an array of tables"
    if dataclasses.is_dataclass(hint):
        return "a table"
    return {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}[hint]


def config_text(config: Config) -> str:
    """`config` as TOML; fields that are None are left out, so that reading it gives the same config."""
    return tomli_w.dumps(without_none(dataclasses.asdict(config)))


def print_help(prog: str) -> None:
    """Print every section and field with its docstring and default, then exit with 0."""
    tyro.cli(Config, args=["--help"], prog=f"{prog} CONFIG.toml", use_underscores=True,
             description="Settings come from the TOML file; --section.key value overrides one of them. [[optimizer.groups]] tables, in TOML "
             'only, claim parameters by name: pattern = "blocks.*.qkv.weight" and any key of [optimizer.matrix].',
             config=(tyro.conf.FlagConversionOff,))
