"""Print the resolved config of files and options, each value with where it comes from."""

import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import tomli_w

from torchmars.config import ResolvedConfig
from torchmars.config.load import (
    NamedTables,
    flattened,
    has,
    load_sources,
    merge,
    source_of,
    validate,
    without_none,
)
from torchmars.core.console import say
from torchmars.core.errors import exit_on_user_error
from torchmars.core.words import table


@dataclass
class ShowConfig:
    """Print the resolved config of files and options, each value with where it comes from.

    A config file may hold what is printed. A value that is neither set nor a default follows from
    others.
    """


def main() -> None:
    """Print the config that the command line names."""
    with exit_on_user_error():
        _, sources, _ = load_sources(ShowConfig, sys.argv[1:], "torchmars config")
        say(*table([*values_with_sources(validate(sources), sources)]))


def values_with_sources(
    config: ResolvedConfig, sources: list[NamedTables]
) -> Iterator[tuple[str, str]]:
    """Yield each value as TOML, and where it is from."""
    defaults: dict[str, Any] = {}
    merged = merge(sources)  # without what a later table has dropped
    for section, values in vars(config).items():
        defaults |= flattened(asdict(type(values)()), f"{section}.")
    for name, value in flattened(without_none(asdict(config))).items():
        from_default = "default" if defaults.get(name) == value else "follows from others"
        source = source_of(sources, name) if has(merged, name) else ""
        yield f"{name} = {toml(value)}", f"# {source or from_default}"


def toml(value: Any) -> str:
    """Return a value as TOML, on one line."""
    if isinstance(value, list):
        return f"[{', '.join(map(toml, value))}]"
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{key} = {toml(item)}' for key, item in value.items())} }}"
    return tomli_w.dumps({"x": value}).removeprefix("x = ").removesuffix("\n")
