"""Settings of before: those that have another name now (`Was`), and those that are gone."""

import os
import typing
from collections.abc import Callable, Sequence
from functools import cache

from torchmars.config.config import Config
from torchmars.config.fields import Was
from torchmars.config.toml_files import Tables, flattened
from torchmars.core.console import say
from torchmars.core.errors import UserError
from torchmars.core.typed import table_in
from torchmars.optim.rules import RULES

# Each has the one value that equals the remaining behaviour: it is dropped, any other is refused.
GONE = {"optimizer.exact_fraction": 1.0}
# Sections whose tables `extra` held the settings of plugins, which stand in the sections now.
LIFTED = ("model", "optimizer")
# The old names that a warning has told of. Ranks have it from their launcher.
TOLD = "TORCHMARS_RENAMED"


def renewed(tables: Tables, source: str = "") -> Tables:
    """Return a whole config with the names of today, and without what is gone and dropped.

    `source` says where it is from: without one nothing warns of old names, as in what a run left,
    which nobody should change. Raises `UserError` where a setting has both its names.
    """
    return without_dropped(renamed(tables, source))


def lifted(tables: Tables, source: str) -> Tables:
    """Return a config's tables with what is in a section's `extra` in the section itself.

    `source` and errors: as `renewed`.
    """
    found = dict(tables)
    for section in LIFTED:
        table = found.get(section)
        if isinstance(table, dict) and isinstance(extra := table.get("extra"), dict):
            own = {name: value for name, value in table.items() if name != "extra"}
            if both := [name for name in extra if name in own]:
                raise UserError(
                    f"{section}.extra.{both[0]} is called {section}.{both[0]} now, and both are "
                    f"set ({source}): remove {section}.extra.{both[0]}"
                )
            if source and extra:
                warn_of_old_name(f"{section}.extra", section, source)
            found[section] = own | extra
    return found


def renamed(tables: Tables, source: str, kind: type = Config, above: str = "") -> Tables:
    """Return a config's tables with the names of today. `source` and errors: as `renewed`."""
    found = dict(tables) if above else lifted(tables, source)
    for name, (old, inner) in names_of(kind).items():
        if old in found:
            if name in found:
                raise UserError(
                    f"{above}{old} is called {above}{name} now, and both are set ({source}): "
                    f"remove {above}{old}"
                )
            if source:
                warn_of_old_name(above + old, above + name, source)
            found[name] = found.pop(old)
        value = found.get(name)
        if inner and isinstance(value, dict):
            found[name] = renamed(value, source, inner, f"{above}{name}.")
        elif inner and isinstance(value, list):
            found[name] = [
                renamed(each, source, inner, f"{above}{name}.") if isinstance(each, dict) else each
                for each in value
            ]
    return found


def without_dropped(tables: Tables) -> Tables:
    """Return a whole config without the settings that are gone, if what is left does the same."""
    found = dict(tables)
    for name, dropped in GONE.items():
        section, _, key = name.partition(".")
        table = found.get(section)
        if isinstance(table, dict) and type(value := table.get(key)) in (int, float):
            if value == dropped:
                found[section] = {each: table[each] for each in table if each != key}
    return found


def with_heads(tables: Tables, default: bool | str) -> Tables:
    """Return a config with its `optimizer.per_head`, which is `default` where it is not set.

    "auto" is the default of some rules now. What an older run left lacks it, and had whole heads.
    """
    table = tables.get("optimizer")
    if not (isinstance(table, dict) and isinstance(name := table.get("name"), str)):
        return tables
    rule = RULES.get(name)
    if rule is None or rule.defaults.get("per_head") != "auto":
        return tables
    return {**tables, "optimizer": {"per_head": default, **table}}


def check_gone(tables: Tables, source_of: Callable[[str], str]) -> None:
    """Raise `UserError` for a setting that is gone and not dropped, in tables `without_dropped`.

    `source_of` says of a setting where it is from.
    """
    for name in flattened(tables):
        gone = next((each for each in GONE if f"{name}.".startswith(f"{each}.")), None)
        if gone is not None:
            raise UserError(
                f"{gone} is a setting no more ({source_of(gone)}): a new run has none, and one "
                f"that was made with another value than {GONE[gone]:g} needs the version of "
                "torchmars that made it"
            )


def warn_of_old_name(old: str, new: str, source: str) -> None:
    """Say once, on one rank or in its launcher, that a setting has another name now."""
    told = os.environ.get(TOLD, "").split()
    if old not in told and os.environ.get("RANK", "0") == "0":
        os.environ[TOLD] = " ".join([*told, old])
        say(f"warning   {old} is called {new} now: rename it ({source})", error=True)


def renewed_path(path: Sequence[str]) -> list[str]:
    """Return the names of today for those that lead to a setting."""
    kind: type | None = Config
    found: list[str] = []
    for step in path:
        names = {} if kind is None else names_of(kind)
        found.append(next((name for name, (old, _) in names.items() if old == step), step))
        kind = names.get(found[-1], ("", None))[1]
    return found


@cache
def names_of(kind: type) -> dict[str, tuple[str, type | None]]:
    """Return of each field of a dataclass its old name, or "", and the type of tables in it."""
    found = {}
    for name, hint in typing.get_type_hints(kind, include_extras=True).items():
        marks = getattr(hint, "__metadata__", ())
        old = (mark.name for mark in marks if isinstance(mark, Was) and mark.name)
        found[name] = (next(old, ""), table_in(hint))
    return found
