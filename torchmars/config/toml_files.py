"""Config files: where they are, which others they extend, and their tables merged."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tomli

from torchmars.core.errors import UserError
from torchmars.core.files import read_text
from torchmars.core.places import local_place
from torchmars.core.typed import make, nearest, question

# A link to the folder at the top of the repository; an installed package has a copy.
SHIPPED = Path(__file__).parents[1] / "train_configs"
EXTENDS = "extends"  # the key of the files that a file builds on
DEEPEST = 100  # files, each of which extends the next one

Tables = dict[str, Any]
# Tables, and where they are from, as errors say it.
NamedTables = tuple[str, Tables]


def find_config(name: str) -> Path:
    """Return the file that `name` is, or else the one of that name in train_configs."""
    shipped = SHIPPED / name
    return shipped if not os.path.lexists(name) and os.path.isfile(shipped) else Path(name)


def read_sources(name: str) -> list[NamedTables]:
    """Return the tables of a config file, after the files that it extends.

    A file that is extended several times counts where it comes last, since it wins there. Raises
    `UserError`.
    """
    return [(f"in {file}", tables) for file, tables in read_files(name, (), {}).items()]


def read_files(
    name: str, extending: tuple[str, ...], read: dict[str, dict[str, Tables]]
) -> dict[str, Tables]:
    """Return the tables of a config file, after the files that it extends, by file.

    `extending` are the files that lead to this one. `read` caches the tables of files read so far.
    """
    if name in extending:
        raise UserError(f"{name} extends itself ({' -> '.join([*extending, name])}): remove one")
    if len(extending) > DEEPEST:
        raise UserError(f"{extending[0]} extends more than {DEEPEST} files, each by the next one")
    if name not in read:
        tables = read_toml(find_config(name))
        found: dict[str, Tables] = {}
        for each in make(list[str], tables.pop(EXTENDS, []), f"in {name}", EXTENDS):
            each = str(local_place(each, f"{EXTENDS} in {name}"))
            for file, its in read_files(each, (*extending, name), read).items():
                found.pop(file, None)
                found[file] = its
        read[name] = found | {name: tables}
    return read[name]


def read_toml(path: Path) -> Tables:
    """Return the tables of a TOML file, with or without a byte order mark.

    Raises `UserError` if it is missing or no TOML.
    """
    try:
        return tomli.loads(read_text(path))
    except OSError as error:
        given = os.environ.get("CONFIG_FILE", "")
        named = path in map(Path, (given, *given.split()))
        file = "set CONFIG_FILE to" if named else "name"
        near = nearest_config(path) if isinstance(error, FileNotFoundError) else ""
        raise UserError(
            f"cannot read the config {path}: {error.strerror}: "
            + (question(near).strip() or f"{file} a TOML file")
        ) from None
    except RecursionError:
        raise UserError(f"{path} is not valid TOML: it is nested too deeply") from None
    except ValueError as error:  # no TOML, no UTF-8, or a number of more digits than Python reads
        raise UserError(f"{path} is not valid TOML: {error}") from None


def nearest_config(path: Path, presets: Iterable[str] = ()) -> str:
    """Return the name of the config that `path` was meant to be; "" if none is like it.

    It is one of ours, one of `presets`, or a file beside `path`.
    """
    ours = [each.relative_to(SHIPPED) for each in sorted(SHIPPED.rglob("*.toml"))]
    files = [each for each in ours if each.parts[0] != "presets"]
    try:
        beside = sorted(path.parent.glob("*.toml"))
    except OSError:  # as for a name that is too long
        beside = []
    known = {each.stem: str(each) for each in reversed(files)}  # without its folder
    known |= {str(each.with_suffix("")): str(each) for each in [*files, *beside]}
    known |= {each: each for each in presets}
    return known.get(nearest(str(path).removesuffix(".toml"), [*known], likeness=0.8), "")


def merge(base: Tables, other: Tables) -> Tables:
    """Return `base` overridden by `other`; tables within are merged too."""
    merged = dict(base)
    for key, value in other.items():
        both = isinstance(merged.get(key), dict) and isinstance(value, dict)
        merged[key] = merge(merged[key], value) if both else value
    return merged


def flattened(tables: Tables, prefix: str = "") -> dict[str, Any]:
    """Return nested tables as one, with dotted names."""
    flat: dict[str, Any] = {}
    for key, value in tables.items():
        flat |= (
            flattened(value, f"{prefix}{key}.")
            if isinstance(value, dict)
            else {f"{prefix}{key}": value}
        )
    return flat
