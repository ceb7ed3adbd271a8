"""From a TOML file and `--section.key value` overrides to a checked `Config`, and back to a file."""

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import tomli
import tomli_w

from torchmars.config import Config
from torchmars.core.errors import UserError
from torchmars.core.files import misfit, read_text
from torchmars.core.typed import Range, Words, check_bounds, convert, fill


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
    fill(config, parse_overrides(args[len(files) :]), "on the command line")
    config.resolve()
    check_places(config)
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
    """The tables of a TOML file, with or without a byte order mark.

    Raises `UserError` where it is missing or no TOML.
    """
    try:
        return tomli.loads(read_text(path).removeprefix("\ufeff"))
    except OSError as error:
        raise UserError(
            f"cannot read the config {path}: {error.strerror}: name a TOML file "
            "(CONFIG_FILE, or the first argument)"
        ) from None
    except RecursionError:
        raise UserError(f"{path} is not valid TOML: it is nested too deeply") from None
    except ValueError as error:  # no TOML, no UTF-8, or a number of more digits than Python reads
        raise UserError(f"{path} is not valid TOML: {error}") from None


def check_places(config: Config) -> None:
    """Raise `UserError` where what the config takes for a folder or a file is something else."""
    run, source = config.run, config.checkpoint.init_from or ""
    source_kind = "file" if source.endswith(".safetensors") else "folder"
    places = [
        ("run.folder", run.folder, "folder"),
        ("run.name", f"{run.folder}/{run.name}", "folder"),
        ("data.path", config.data.path, "folder"),
        ("checkpoint.init_from", source, source_kind),
    ]
    for option, place, kind in places:
        if wrong := misfit(place, kind):
            raise UserError(
                f"{option}: {place} is no {kind} that can be used ({wrong}): choose another one"
            )


def parse_overrides(args: list[str]) -> dict[str, Any]:
    """`--section.key value ...` and `--section.key=value` as nested tables of words."""
    tables: dict[str, Any] = {}
    position = 0
    while position < len(args):
        option, equals, value = args[position].partition("=")
        position += 1
        *path, key = option.removeprefix("--").replace("-", "_").split(".")
        if not (option.startswith("--") and path and key):
            raise UserError(
                f"cannot read the argument {option!r}: overrides look like --section.key value, see --help"
            )
        words = Words([value] if equals else [])
        while not equals and position < len(args) and not args[position].startswith("--"):
            words.append(args[position])
            position += 1
        table = tables
        for name in path:
            table = table.setdefault(name, {})
            if isinstance(table, Words):
                raise UserError(
                    f"{option} cannot be given beside --{'.'.join(path)}: that is a table"
                )
        table[key] = words
    return tables


def take_count(args: list[str], option: str, default: int, least: int = 1) -> tuple[list[str], int]:
    """Split `--ranks N`, or another such option, off a command line: the rest, and the number.

    Raises `UserError` for one out of bounds.
    """
    if option not in args:
        return args, default
    place, hint = args.index(option), Annotated[int, Range(least, 100_000)]
    count = convert(Words(args[place + 1 : place + 2]), hint, option, "on the command line")
    check_bounds(count, hint, option)
    return args[:place] + args[place + 2 :], count


def config_text(config: Config) -> str:
    """`config` as TOML; fields that are None are left out, so that reading it gives the same config."""
    return tomli_w.dumps(without_none(dataclasses.asdict(config)))


def print_help(prog: str) -> None:
    """Print every section and field with its docstring and default, then exit with 0."""
    import tyro  # takes longer than all checks of a config

    tyro.cli(
        Config,
        args=["--help"],
        prog=f"{prog} CONFIG.toml",
        use_underscores=True,
        description="Settings come from the TOML file; --section.key value overrides one of them. [[optimizer.groups]] tables, in TOML "
        'only, claim parameters by name: pattern = "blocks.*.qkv.weight" and any key of [optimizer.matrix].',
        config=(tyro.conf.FlagConversionOff,),
    )
