"""The tables that plugins add to, and the contract of their entries."""

import re
from collections.abc import Callable, Mapping
from typing import Any

from torchmars.config.model import MODELS
from torchmars.config.source import KINDS, NAMES, DataSource, SourceKind
from torchmars.core.errors import UserError
from torchmars.optim.rules import RULES, MatrixRule, Rule
from torchmars.optim.settings import MATRIX_SETTINGS, Setting

TABLES: dict[str, dict[Any, Any]] = {}
OWN: dict[str, dict[Any, Any]] = {}  # the package's entries of each
PROBLEMS: dict[str, Callable[[str, Any], str]] = {}  # the fault of an entry, "" if there is none
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
CLASS = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")


def declare(title: str, table: dict[Any, Any], problem: Callable[[str, Any], str]) -> None:
    """Let plugins add to a table, which has the package's own entries so far."""
    TABLES[title], OWN[title], PROBLEMS[title] = table, dict(table), problem


def check_tables(before: Mapping[str, dict[Any, Any]] = OWN) -> None:
    """Raise `UserError` for an entry that cannot be used, and for one that replaces another.

    `before` are the entries that the tables had, by default the package's own.
    """
    for title in OWN:
        table = TABLES[title]
        had = before.get(title, OWN[title])
        for name, entry in had.items():
            if table.get(name) is not entry:
                raise UserError(f"{title}[{name!r}] is there already: give yours another name")
        for name in table.keys() - had.keys():
            where = f"{title}[{name!r}]"
            if not (isinstance(name, str) and NAME.fullmatch(name)):
                raise UserError(
                    f"{where} has no name that can be written: take letters, digits, '-' and '_'"
                )
            try:
                wrong = PROBLEMS[title](name, table[name])
            except Exception as error:  # whatever the code of a plugin raises
                wrong = f"raises {type(error).__name__}: {error}"
            if wrong:
                raise UserError(f"{where} {wrong}: docs/extending.md shows one")


def problem_of_model(name: str, entry: Any) -> str:
    """Return the fault of an entry of MODELS; an empty text if there is none."""
    good = isinstance(entry, str) and CLASS.fullmatch(entry)
    return "" if good else f'must be the place of its class, "module.Class", got {entry!r}'


def problem_of_rule(name: str, entry: Any) -> str:
    """Return the fault of an entry of RULES; an empty text if there is none."""
    if not isinstance(entry, Rule):
        return f"must be an ElementwiseRule or a MatrixRule, made by its class(), got {entry!r}"
    if getattr(entry, "name", None) != name:
        return f"must have that name, and has {getattr(entry, 'name', None)!r}"
    settings = getattr(entry, "settings", None)
    if not (isinstance(settings, tuple) and all(isinstance(each, Setting) for each in settings)):
        return f"must have settings, a tuple of Setting, got {settings!r}"
    names = [each.name for each in settings]
    needed = ["lr", "betas", "eps", "weight_decay"]
    needed += ["gamma", "clip"] if entry.variance_reduced else []
    needed += [each.name for each in MATRIX_SETTINGS] if isinstance(entry, MatrixRule) else []
    if missing := [each for each in needed if each not in names]:
        return f"lacks the settings {', '.join(missing)}"
    if len({*names}) < len(names):
        return "has two settings of one name"
    for setting in settings:
        setting.check(setting.default)
    buffers = entry.buffers(1.0, False, False)
    if not (isinstance(buffers, tuple) and buffers and all(isinstance(b, str) for b in buffers)):
        return f"must have buffers, a tuple of names, got {buffers!r}"
    return ""


def problem_of_kind(name: str, entry: Any) -> str:
    """Return the fault of an entry of KINDS; an empty text if there is none."""
    if not isinstance(entry, SourceKind):
        return f"must be a SourceKind, got {entry!r}"
    if name in NAMES:
        return f"cannot be reached: {name} stands for {NAMES[name]}"
    for field in ("parts", "suffixes"):
        value = getattr(entry, field)
        if not (isinstance(value, tuple) and all(isinstance(each, str) for each in value)):
            return f"must have {field}, a tuple of texts, got {value!r}"
    known = [each for each in DataSource.__dataclass_fields__ if each != "kind"]
    if unknown := [each for each in entry.parts if each not in known]:
        return f"has the parts {', '.join(unknown)}, and may have {', '.join(known)}"
    return ""


declare("MODELS", MODELS, problem_of_model)
declare("RULES", RULES, problem_of_rule)
declare("KINDS", KINDS, problem_of_kind)
