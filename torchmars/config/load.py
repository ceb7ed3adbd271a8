"""From TOML files and `--section.key value` overrides to a resolved config, and back to a file."""

import contextlib
import dataclasses
import os
from collections.abc import Sequence
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal, TypeVar

import tomli_w

from torchmars.config.checkpoint import HF
from torchmars.config.config import Config, ResolvedConfig, kind_of
from torchmars.config.entries import check_tables
from torchmars.config.model import ModelConfig
from torchmars.config.plugins import load_plugins, not_loaded
from torchmars.config.presets import find_sources
from torchmars.config.run import Modules
from torchmars.config.source import parse_source
from torchmars.config.toml_files import NamedTables, Tables, merge
from torchmars.core.errors import UserError
from torchmars.core.files import path_problem
from torchmars.core.help import help_asked, options_of, print_help_if_asked
from torchmars.core.options import take_options
from torchmars.core.places import place
from torchmars.core.typed import (
    dotted_names,
    hint_at,
    make,
    nearest,
    question,
    read_words,
    setting_meant,
    table_in,
)
from torchmars.optim.rules import RULES

COMMAND_LINE = "on the command line"
# Other commands, which have no config, have this option too.
SHORT = {"--plugins": "--run.plugins"}
SECTIONS = [each.name for each in dataclasses.fields(Config)]
OVERRIDES = "overrides look like --section.key value, see --help"
# For options that other programs have.
REMEDIES = {
    "--resume": "the same command again goes on where the run stopped",
    "--dry-run": "torchmars plan says what a run would take",
    "--print-config": "torchmars config prints the resolved config",
}
DESCRIPTION = (
    "Settings come from the TOML files; of two files the later one wins. The name of a preset "
    "stands for several files: torchmars presets lists them. --section.key value "
    "overrides one setting. [[optimizer.groups]] tables, in TOML only, claim parameters by name: "
    'pattern = "blocks.*.qkv.weight" and any key of [optimizer.matrix]. [[data.mixture]] tables, '
    "in TOML only, are corpora with weights."
)

T = TypeVar("T")

# The keys of [data] that name a corpus, in one way or the other.
SINGLE, MIXTURE = {"source", "files"}, {"mixture"}


def load_command(
    kind: type[T], args: list[str], prog: str, before: Sequence[NamedTables] = ()
) -> tuple[T, ResolvedConfig, list[str]]:
    """Return a command's own options, the dataclass `kind`, the config of the rest, and the rest.

    `before` are settings of the command, which all others override. `--help` prints both with their
    defaults and exits. Raises `UserError` for anything the user got wrong.
    """
    print_help(args, prog, kind)
    options, rest = take_options(kind, args)
    return options, config_of([*before, *load_sources(rest, prog, kind)]), rest


def load_config(args: list[str], prog: str, *options: type) -> ResolvedConfig:
    """Return the resolved config of `[CONFIG.toml ...] [--section.key value ...]`.

    `--help` prints every field with its default, calls the command `prog`, tells of its own
    `options` too, and exits. Raises `UserError` for anything the user got wrong.
    """
    return config_of(load_sources(args, prog, *options))


def load_sources(args: list[str], prog: str, *options: type) -> list[NamedTables]:
    """Return the tables that `args` name, as of `load_config`, and where each is from.

    `--help` tells of the command's own `options` too. Raises `UserError`.
    """
    print_help(args, prog, *options)
    return sources_in(args, *options)


def print_help(args: list[str], prog: str, *options: type) -> None:
    """Print the help of a command that has settings, where `args` ask for it, and exit.

    It has the settings of the plugins that `args` name too, where these can be read.
    """
    kind: type[Config] = Config
    named, rest = help_asked(args)
    if named is not None:
        with contextlib.suppress(UserError):
            for each in options:
                _, rest = take_options(each, rest)
            sources = sources_in(rest)
            load_named_plugins(sources)
            kind = kind_for(merged(sources))
    print_help_if_asked(
        args, f"{prog} [CONFIG.toml ...]", *options, settings=kind, more=DESCRIPTION
    )


def sources_in(args: list[str], *options: type) -> list[NamedTables]:
    """Return the tables of the files and of the overrides in `args`, and where each is from.

    Raises `UserError`, which may name one of the command's own `options`.
    """
    own = [each.spelled for kind in options for each in options_of(kind) if not each.positional]
    files = list(takewhile(lambda arg: not arg.startswith("--"), args))
    return [*sources_of(files), (COMMAND_LINE, parse_overrides(args[len(files) :], own))]


def sources_of(files: list[str]) -> list[NamedTables]:
    """Return the tables of config files or presets, and where each is from. Raises `UserError`.

    The first file gives the run its name, where no table does.
    """
    sources = [source for file in files for source in sources_named(file)]
    if files:
        sources.insert(0, (f"the name of {files[0]}", {"run": {"name": config_name(files[0])}}))
    return sources


def sources_named(file: str) -> list[NamedTables]:
    """Return the tables of a config file or a preset. Raises `UserError`, also for a setting."""
    try:
        return find_sources(file)
    except UserError:
        name, equals, value = file.lstrip("-").partition("=")
        near = name if name in dotted_names(Config) else ""
        if equals and not near:
            near = setting_meant(Config, [], name.replace(".", "_"))
        if os.path.lexists(file) or near in ("", *SECTIONS):
            raise
        given = f"--{near} {value}".strip()
        raise UserError(f"cannot read the config {file}: did you mean {given}?") from None


def require_config(args: list[str], prog: str = "torchmars train") -> None:
    """Raise `UserError` if `args`, as of `load_config`, begin with no config."""
    if not args or args[0].startswith("--"):
        raise UserError(f"no config is named: {prog} quickstart.toml takes one of a small model")


def config_name(file: str) -> str:
    """Return the default name of a run of a config file or a preset."""
    return Path(file).name.removesuffix(".toml")


def config_of(sources: list[NamedTables]) -> ResolvedConfig:
    """Return the resolved config of a command line's tables; load its plugins.

    Raises `UserError`.
    """
    load_named_plugins(sources)
    config = config_from_sources(sources)
    check_places(config)
    return config


def load_named_plugins(sources: list[NamedTables]) -> None:
    """Load the plugins that a command line's tables name. Raises `UserError`."""
    setting = "run.plugins"
    named = [(source, tables["run"]) for source, tables in sources if has(tables, setting)]
    for source, run in named[-1:]:
        plugins = run.get("plugins") if isinstance(run, dict) else run
        load_plugins(make(Modules, plugins, source, setting))


def config_from_tables(tables: Tables, source: str) -> ResolvedConfig:
    """Return the resolved config of a table for each section, such as a checkpoint keeps.

    `source` says in errors where it is from.
    """
    try:
        return config_from_sources([(source, without_none(tables))])
    except UserError:
        if not (missing := not_loaded(tables)):
            raise
        raise UserError(
            f"the run had the plugins {', '.join(missing)}, which a file of a run cannot load: if "
            f"you trust them, add --plugins {','.join(missing)} (in Python: import them)"
        ) from None


def config_from_sources(sources: list[NamedTables]) -> ResolvedConfig:
    """Return the resolved config of tables and where each is from; of two the later one wins.

    Raises `UserError`.
    """
    check_tables()
    tables = merged(sources)
    return make(kind_for(tables), tables, partial(source_of, sources)).resolve()


def source_of(sources: list[NamedTables], setting: str) -> str:
    """Return where a setting is from, the last that has it; "" where none has."""
    return next((name for name, tables in reversed(sources) if has(tables, setting)), "")


def kind_for(tables: Tables) -> type[Config]:
    """Return the config that tables are read as. Raises `UserError`."""
    model = tables.get("model")
    return kind_of(str(model.get("name")) if isinstance(model, dict) else ModelConfig.name)


def merged(sources: list[NamedTables]) -> Tables:
    """Return the tables of all sources as one; of two values the later one wins."""
    found: Tables = {}
    for _, tables in sources:
        kept = without_other_rule(without_other_corpus(found, tables), tables)
        found = merge(kept, tables)
    return found


def without_other_corpus(base: Tables, later: Tables) -> Tables:
    """Return `base` without what it says of the corpus where `later` says it in the other way.

    A corpus is either data.source with data.files, or data.mixture.
    """
    data, now = base.get("data"), later.get("data")
    if not (isinstance(data, dict) and isinstance(now, dict)):
        return base
    for one, other in ((SINGLE, MIXTURE), (MIXTURE, SINGLE)):
        if one & set(now) and not other & set(now):
            data = {key: value for key, value in data.items() if key not in other}
    return base | {"data": data}


def without_other_rule(base: Tables, later: Tables) -> Tables:
    """Return `base` without the settings in [optimizer] that the rule `later` names does not have.

    So a file, or the command line, can name another rule after a file that sets up its own.
    """
    optimizer, now = base.get("optimizer"), later.get("optimizer")
    if not (isinstance(optimizer, dict) and isinstance(now, dict)):
        return base
    rule = RULES.get(str(now.get("name")))
    if rule is None:
        return base
    foreign = {name for each in RULES.values() for name in each.defaults} - set(rule.defaults)
    kept = {key: value for key, value in optimizer.items() if key not in foreign}
    return base | {"optimizer": kept}


def has(tables: Tables, key: str) -> bool:
    """Return whether nested tables have a value of a dotted name, or one above it."""
    value: Any = tables
    for name in key.split("."):
        if not isinstance(value, dict):
            return True
        if name not in value:
            return False
        value = value[name]
    return True


def without_none(value: Any) -> Any:
    """Return nested tables without the keys that are None and without tables that are empty."""
    if isinstance(value, dict):
        kept = {key: without_none(item) for key, item in value.items() if item is not None}
        return {key: item for key, item in kept.items() if item != {}}
    return [without_none(item) for item in value] if isinstance(value, (list, tuple)) else value


def check_places(config: ResolvedConfig) -> None:
    """Raise `UserError` if a folder or file of the config is something else."""
    for corpus in config.data.corpora():
        parts = parse_source(corpus.source)
        if parts.of_files or parts.of_tokens or parts.dataset:  # not a plugin's own
            named = parts.glob or parts.dataset
            place(named, "data.source", stores=parts.of_files, pattern=True)
        for pattern in corpus.files:
            place(pattern, "data.files", pattern=True)
    run, source = config.run, (config.checkpoint.init_from or "").removeprefix(HF)
    source_kind: Literal["file", "folder"] = "file" if source.endswith(".safetensors") else "folder"
    places: list[tuple[str, str, Literal["file", "folder"]]] = [
        ("run.folder", run.folder, "folder"),
        ("run.name", str(run.path), "folder"),
        *[("data.path", data.path, "folder") for data in config.data.corpora()],
        ("checkpoint.init_from", source, source_kind),
    ]
    for option, path, kind in places:
        if wrong := path_problem(path, kind):
            raise UserError(
                f"{option}: {path} is no {kind} that can be used ({wrong}): choose another one"
            )


def parse_overrides(args: list[str], own: Sequence[str] = ()) -> Tables:
    """Return `--section.key value ...` and `--section.key=value` as nested tables.

    Raises `UserError`, which may name one of the command's `own` options.
    """
    tables: Tables = {}
    while args:
        option, equals, value = args[0].partition("=")
        option = SHORT.get(option, option)
        *path, key = option.removeprefix("--").replace("-", "_").split(".")
        if not (option.startswith("--") and path and key):
            remedy = REMEDIES.get(option) or question(nearest(option, own, 0.8)).strip()
            remedy = remedy or remedy_for(key if option.startswith("--") else "", own)
            raise UserError(f"cannot read the argument {option!r}: {remedy}")
        following = [] if equals else list(takewhile(is_value, args[1:]))
        args = args[1 + len(following) :]
        table = tables
        for name in path:
            table = table.setdefault(name, {})
            if not isinstance(table, dict):
                raise UserError(
                    f"{option} cannot be given beside --{'.'.join(path)}: that is a table"
                )
        words = [value] if equals else following
        if option in SHORT.values():
            words = [word for each in words for word in each.split(",")]
        table[key] = read_override([*path, key], words)
    return tables


def remedy_for(name: str, own: Sequence[str] = ()) -> str:
    """Return what to write instead of `name` on the command line, which says no section.

    A command that tries values of a setting has an option of its `own` for them.
    """
    near = name if name in SECTIONS else name and setting_meant(Config, [], name)
    if near in SECTIONS:
        return section_remedy(near)
    grid = f"--{near.rpartition('.')[2].replace('_', '-')}-grid"
    if grid in own:
        return f"did you mean {grid}?"
    short = {setting: option for option, setting in SHORT.items()}
    return f"did you mean {short.get(f'--{near}', f'--{near}')}?" if near else OVERRIDES


def section_remedy(section: str) -> str:
    """Return what to write instead of the name of a section as an option."""
    first = next((name for name in dotted_names(Config) if name.startswith(f"{section}.")), "")
    if not first:
        return f"{section} is an array of tables: write [[{section}]] tables in a TOML file"
    return (
        f"--{section} is a section: write --{first} ...; torchmars train --help {section} "
        "lists its settings"
    )


def is_value(arg: str) -> bool:
    """Return whether an argument is no option."""
    return not arg.startswith("--")


def read_override(path: list[str], words: list[str]) -> Any:
    """Return the value of the words after an option, as TOML would have it."""
    try:
        hint = hint_at(Config, path)
    except KeyError:  # a plugin's, or none: `make` says which name was meant
        hint = Any
    if table_in(hint) is not None:
        raise UserError(section_remedy(".".join(path)))
    return read_words(words, hint, ".".join(path))


def config_text(config: Config) -> str:
    """Return `config` as TOML that reads back as the same. Fields that are None are left out."""
    return tomli_w.dumps(without_none(dataclasses.asdict(config)))
