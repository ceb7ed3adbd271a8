"""Print the resolved config of files and options, each value with where it comes from."""

import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tomli_w

from torchmars.config import ResolvedConfig
from torchmars.config.load import (
    NamedTables,
    config_from_tables,
    flattened,
    has,
    load_sources,
    merge,
    source_of,
    validate,
    without_none,
)
from torchmars.config.sections import HF, OF_RANKS
from torchmars.core.console import say
from torchmars.core.errors import exit_on_user_error
from torchmars.core.words import or_none, table
from torchmars.records.run import read_run


@dataclass
class ShowConfig:
    """Print the resolved config of files and options, each value with where it comes from.

    A config file may hold what is printed. A value that is neither set nor a default follows from
    others.
    """

    diff: Path | None = None
    """Print only what differs from the config of the run in this folder, the run's value first."""


def main() -> None:
    """Print the config that the command line names."""
    with exit_on_user_error():
        options, sources, _ = load_sources(ShowConfig, sys.argv[1:], "torchmars config")
        config = validate(sources)
        if options.diff is None:
            rows = [*values_with_sources(config, sources)]
        else:
            rows = [*other_values(options.diff, config)] or [("nothing differs", "")]
        say(*table(rows))


def values_with_sources(
    config: ResolvedConfig, sources: list[NamedTables]
) -> Iterator[tuple[str, str]]:
    """Yield each value as TOML, and where it is from."""
    defaults: dict[str, Any] = {}
    merged = merge(sources)  # without what a later table has dropped
    for section, values in vars(config).items():
        defaults |= flattened(asdict(type(values)()), f"{section}.")
    for name, value in set_values(config).items():
        from_default = "default" if defaults.get(name) == value else "follows from others"
        source = source_of(sources, name) if has(merged, name) else ""
        yield f"{name} = {toml(value)}", f"# {source or from_default}"


def other_values(run: Path, config: ResolvedConfig) -> Iterator[tuple[str, str]]:
    """Yield the settings that a run has otherwise, with its value and that of `config`.

    Those that the run itself has derived, as `config` would leave it to, are no difference.
    """
    theirs = set_values(config_from_tables(read_run(run).config, f"in {run}"))
    ours = set_values(config)
    for name in dict.fromkeys([*theirs, *ours]):
        was, now = theirs.get(name), ours.get(name)
        derived = name in OF_RANKS and now in (None, "auto")
        pinned = str(now).startswith(HF) and str(was).startswith(f"{now}@")
        if was != now and not derived and not pinned:
            yield name, " -> ".join(or_none(each, toml) for each in (was, now))


def set_values(config: ResolvedConfig) -> dict[str, Any]:
    """Return the settings that have a value, by dotted names."""
    return flattened(without_none(asdict(config)))


def toml(value: Any) -> str:
    """Return a value as TOML, on one line."""
    if isinstance(value, list):
        return f"[{', '.join(map(toml, value))}]"
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{key} = {toml(item)}' for key, item in value.items())} }}"
    return tomli_w.dumps({"x": value}).removeprefix("x = ").removesuffix("\n")
