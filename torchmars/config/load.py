"""From TOML files and `--section.key value` to a resolved config, and back to a file.

Five functions in this order: `read` (files, with what they extend), `merge`, `load_named_plugins`,
`overlay` (the command line), `validate`. Tables keep where they are from: errors say so.
"""

import argparse
import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal, TypeVar

import tomli
import tomli_w

from torchmars.config.model import OWN, ModelConfig, family_settings
from torchmars.config.optimizer import OptimizerConfig
from torchmars.config.plugins import load_plugins
from torchmars.config.sections import HF, Config, ResolvedConfig, sections_of
from torchmars.core import cli
from torchmars.core.check import make, meant
from torchmars.core.cli import COMMAND_LINE, settings_in
from torchmars.core.errors import UserError
from torchmars.core.files import path_problem, read_text
from torchmars.core.places import local_place
from torchmars.optim.rules import RULES

T = TypeVar("T")
Tables = dict[str, Any]
NamedTables = tuple[str, Tables]  # tables, and where they are from, as errors say it

# A link to the folder at the top of the repository; an installed package has a copy.
SHIPPED = Path(__file__).parents[1] / "train_configs"
EXTENDS = "extends"  # the key of the files that a file builds on
# The keys of [data] that name a corpus, in one way or the other.
SINGLE, MIXTURE = {"source", "files"}, {"mixture"}
# Of a preset what is not a setting, but said of it.
ABOUT = "about"
DESCRIPTION = (
    "Settings come from the TOML files; of two files the later one wins. A preset is a file too: "
    "torchmars presets lists them. --section.key value overrides one setting. "
    "[[optimizer.groups]] tables, in TOML only, claim parameters by name: "
    'pattern = "blocks.*.qkv.weight" and any key of [optimizer.matrix]. [[data.mixture]] tables, '
    "in TOML only, are corpora with weights."
)


def load_command(
    kind: type[T], args: list[str], prog: str, before: Sequence[NamedTables] = ()
) -> tuple[T, ResolvedConfig, list[str]]:
    """Return a command's own options, the dataclass `kind`, its config, and the config's arguments.

    `before` are settings of the command, which all others override. `--help` prints both with their
    defaults and exits. Raises `UserError` for anything the user got wrong.
    """
    options, sources, rest = load_sources(kind, args, prog)
    return options, validate([*before, *sources]), rest


def load_config(args: list[str], prog: str) -> ResolvedConfig:
    """Return the resolved config of `[CONFIG.toml ...] [--section.key value ...]`.

    `--help` prints the settings, and exits. Raises `UserError` for anything the user got wrong.
    """
    return load_command(NoOptions, args, prog)[1]


@dataclasses.dataclass
class NoOptions:
    """Settings of a run."""


def load_sources(
    kind: type[T], args: list[str], prog: str
) -> tuple[T, list[NamedTables], list[str]]:
    """Return a command's own options, its tables, and the arguments that are not its own."""
    mine, rest = cli.taken([*map(full_name, args)], kind)
    files = files_in(rest)
    sources = read(files)
    sections = sections_for(rest, sources)
    named = [s[2:].partition("=")[0].replace("-", "_") for s in rest if s.startswith("--")]
    check_names([each for each in named if "." in each], lambda _: COMMAND_LINE, sections)
    given = [*mine, *rest[len(files) :]]
    options, found = cli.parse(kind, given, f"{prog} [CONFIG.toml ...]", sections, DESCRIPTION)
    sources.append((COMMAND_LINE, overlay(found)))
    return options, sources, rest


def full_name(arg: str) -> str:
    """Return an argument, where it is `--plugins` as the setting that this is short for."""
    name, equals, value = arg.partition("=")
    return f"--run.plugins{equals}{value}" if name == "--plugins" else arg


def files_in(args: Sequence[str]) -> list[str]:
    """Return the files that a command line begins with."""
    return [*takewhile(lambda arg: not arg.startswith("-"), args)]


def require_config(args: list[str], prog: str = "torchmars train") -> None:
    """Raise `UserError` if `args`, as of `load_config`, begin with no config."""
    if not files_in(args):
        raise UserError(f"no config is named: {prog} quickstart.toml takes one of a small model")


def read(files: Iterable[str]) -> list[NamedTables]:
    """Return the tables of config files, after those that they extend. Raises `UserError`.

    A file that is extended several times counts where it comes last, since it wins there. The first
    file gives the run its name, where no table does.
    """
    sources: list[NamedTables] = []
    for name in files:
        found = read_extended(str(local_place(name, "the name of a config")), (), {})
        sources += [(f"in {file}", tables) for file, tables in found.items()]
        if len(sources) == len(found):
            run = {"name": Path(name).name.removesuffix(".toml")}
            sources.insert(0, (f"the name of {name}", {"run": run}))
    return sources


def read_extended(
    name: str, extending: tuple[str, ...], read: dict[str, dict[str, Tables]]
) -> dict[str, Tables]:
    """Return the tables of a config file, after the files that it extends, by file.

    `extending` are the files that lead to this one. `read` caches the tables of files read so far.
    """
    if name in extending:
        raise UserError(f"{name} extends itself ({' -> '.join([*extending, name])}): remove one")
    if name not in read:
        tables = read_toml(find_config(name))
        tables.pop(ABOUT, None)
        found: dict[str, Tables] = {}
        for each in make(list[str], tables.pop(EXTENDS, []), f"in {name}", EXTENDS):
            each = str(local_place(each, f"{EXTENDS} in {name}"))
            for file, its in read_extended(each, (*extending, name), read).items():
                found.pop(file, None)
                found[file] = its
        read[name] = found | {name: tables}
    return read[name]


def find_config(name: str) -> Path:
    """Return the file that `name` is, or else the one of that name in train_configs.

    A preset goes by its name without `.toml`.
    """
    shipped = [SHIPPED / name, SHIPPED / "presets" / f"{name}.toml"]
    found = [] if os.path.lexists(name) else [each for each in shipped if os.path.isfile(each)]
    return found[0] if found else Path(name)


def read_toml(path: Path) -> Tables:
    """Return the tables of a TOML file, with or without a byte order mark.

    Raises `UserError` if it is missing or no TOML.
    """
    if path.suffix == ".txt":
        own = f"torchmars train quickstart.toml --data.source text:{path}"
        raise UserError(f"{path} is a text: {own} trains on it")
    try:
        return tomli.loads(read_text(path))
    except OSError as error:
        verb = "set CONFIG_FILE to" if "CONFIG_FILE" in os.environ else "name"
        raise UserError(
            f"cannot read the config {path}: {error.strerror}: {verb} a TOML file, or a preset "
            "(torchmars presets)"
        ) from None
    except (ValueError, RecursionError) as error:  # no TOML, no UTF-8, or nested too deeply
        raise UserError(f"{path} is not valid TOML: {error}") from None


def merge(sources: Sequence[NamedTables]) -> Tables:
    """Return the tables of all sources as one; of two values the later one wins.

    Where a later one names another rule, or another corpus, what is the former's own is dropped.
    """
    found: Tables = {}
    for _, tables in sources:
        kept = without_other_rule(without_other_corpus(found, tables), tables)
        found = merge_two(kept, tables)
    return found


def merge_two(base: Tables, other: Tables) -> Tables:
    """Return `base` overridden by `other`; tables within are merged too."""
    merged = dict(base)
    for key, value in other.items():
        both = isinstance(merged.get(key), dict) and isinstance(value, dict)
        merged[key] = merge_two(merged[key], value) if both else value
    return merged


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


def load_named_plugins(sources: Sequence[NamedTables]) -> None:
    """Load the plugins that tables name, of two lists those of the later. Raises `UserError`."""
    runs = [(source, tables.get("run")) for source, tables in sources]
    named = [(source, run) for source, run in runs if isinstance(run, dict) and "plugins" in run]
    for source, run in named[-1:]:
        load_plugins(make(list[str], run["plugins"], source, "run.plugins"))


def sections_for(args: Sequence[str], sources: Sequence[NamedTables]) -> dict[str, type]:
    """Return the classes of the sections that a command line has, once its plugins are loaded.

    Its files name them, and its options `--plugins`, `--model.name` and `--optimizer.name`.
    """
    parser = cli.Parser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    parser.add_argument("--run.plugins", nargs="+")
    parser.add_argument("--model.name")
    parser.add_argument("--optimizer.name")
    found = vars(parser.parse_known_args([*args])[0])
    named = [*sources, (COMMAND_LINE, overlay(found))]
    load_named_plugins(named)
    with located(named):
        return chosen_sections(merge(named))


def chosen_sections(tables: Tables) -> dict[str, type]:
    """Return the classes of the sections by which tables are read. Raises `UserError`."""
    names = [("model", ModelConfig.name), ("optimizer", OptimizerConfig.name)]
    chosen = []
    for section, name in names:
        table = tables.get(section)
        chosen.append(str(table.get("name", name)) if isinstance(table, dict) else name)
    return sections_of(*chosen)


def overlay(settings: Mapping[str, Any]) -> Tables:
    """Return settings of a command line, by dotted names, as tables within tables."""
    tables: Tables = {}
    for name, value in settings.items():
        *above, key = name.split(".")
        table = tables
        for section in above:
            table = table.setdefault(section, {})
        if name == "run.plugins":  # --plugins A,B
            value = [each for word in value for each in word.split(",")]
        table[key] = value
    return tables


def validate(sources: Sequence[NamedTables]) -> ResolvedConfig:
    """Return the resolved config of tables, whose plugins it loads. Raises `UserError`."""
    load_named_plugins(sources)
    config = config_from_sources(sources)
    check_places(config)
    return config


def config_from_sources(sources: Sequence[NamedTables]) -> ResolvedConfig:
    """Return the resolved config of tables and where each is from; of two the later one wins.

    Raises `UserError`.
    """
    tables, where = merge(sources), partial(source_of, sources)
    with located(sources):
        sections = chosen_sections(tables)
        for name in tables:
            if name not in sections and ("." in name or not name):
                raise UserError(f"unknown section {name!r} ({where(name)}): write [SECTION] above")
        check_names(flattened(tables), where, sections)
        made = {
            name: make(kind, tables[name], name=name) if name in tables else kind()
            for name, kind in sections.items()
        }
        return Config(**made).resolve()


@contextlib.contextmanager
def located(sources: Sequence[NamedTables]) -> Iterator[None]:
    """Add where it is from to an error that begins with the name of a setting."""
    try:
        yield
    except UserError as error:
        setting = str(error).split(maxsplit=1)[0]
        source = source_of(sources, setting)
        if not source or source in str(error):
            raise
        raise UserError(f"{error} ({source})") from None


def source_of(sources: Sequence[NamedTables], setting: str) -> str:
    """Return where a setting is from, the last that has it; "" where none has."""
    return next((name for name, tables in reversed(sources) if has(tables, setting)), "")


def has(tables: Tables, key: str) -> bool:
    """Return whether nested tables have a value of a dotted name, or one above it or below."""
    return any(
        f"{key}.".startswith(f"{each}.") or each.startswith(f"{key}.") for each in flattened(tables)
    )


def check_names(
    names: Iterable[str], where: Callable[[str], str], sections: Mapping[str, type]
) -> None:
    """Raise `UserError` for the first of dotted `names` that there is not, with what was meant."""
    tables = dict(cli.tables_in(sections, arrays=True))
    known = [*settings_in(sections), *tables]
    name = next((each for each in names if each not in known), "")
    if not name:
        return
    while (above := name.rpartition(".")[0]) and above not in tables:
        name = above  # the outermost that there is not
    source, key = where(name), name.removeprefix(f"{above}.")
    rules: list[Any] = [each.config for each in RULES.values()]
    of_others = {"optimizer": rules, "model": [*map(family_settings, OWN)]}.get(above, [])
    if any(key in each.__dataclass_fields__ for each in of_others):
        named = vars(sections[above])["__dataclass_fields__"]["name"].default
        raise UserError(f'{name} has no meaning for {above}.name = "{named}": remove it ({source})')
    inside = [each for each in known if each.rpartition(".")[0] == above]
    kind = "key" if "." in name else "section"
    remedy = meant(name, [*inside, *known]) or f"it may be one of {', '.join(inside)}"
    raise UserError(f"unknown {kind} {name} ({source}): {remedy}")


def config_from_tables(tables: Tables, source: str) -> ResolvedConfig:
    """Return the resolved config of a table for each section, such as a checkpoint keeps.

    `source` says in errors where it is from. Plugins that the tables name are not loaded.
    """
    return config_from_sources([(source, without_none(tables))])


def without_none(value: Any) -> Any:
    """Return nested tables without the keys that are None and without tables that are empty."""
    if isinstance(value, dict):
        kept = {key: without_none(item) for key, item in value.items() if item is not None}
        return {key: item for key, item in kept.items() if item != {}}
    return [without_none(item) for item in value] if isinstance(value, (list, tuple)) else value


def check_places(config: ResolvedConfig) -> None:
    """Raise `UserError` if a folder or file of the config is something else."""
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


def config_text(config: Config) -> str:
    """Return `config` as TOML that reads back as the same. Fields that are None are left out."""
    return tomli_w.dumps(without_none(dataclasses.asdict(config)))


def flattened(tables: Tables, prefix: str = "") -> dict[str, Any]:
    """Return nested tables as one, with dotted names."""
    flat: dict[str, Any] = {}
    for key, value in tables.items():
        flat |= (
            flattened(value, f"{prefix}{key}.")
            if isinstance(value, dict) and value
            else {f"{prefix}{key}": value}
        )
    return flat
