"""Plugins: modules of the user's own that register models, rules, kinds of data and trackers.

Importing one runs its code. So only the user names them: in a config that is trained, or by
`--plugins`. Plugins named by a checkpoint or another file of a run are never imported.
"""

import importlib
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

from torchmars.core.cli import words
from torchmars.core.errors import UserError

T = TypeVar("T")


@dataclass(kw_only=True)
class PluginOptions:
    """Base of the options of commands that read a model of a run. Making it loads the plugins."""

    plugins: str | None = None
    """Modules of yours, with commas between, that register the model: docs/extending.md."""

    def __post_init__(self) -> None:
        if self.plugins is not None:
            load_plugins(words(self.plugins, "--plugins"))


def register(table: dict[str, T], name: str, entry: T) -> None:
    """Add an entry of a plugin to a table of the package.

    Args:
        table: `MODELS`, `FAMILIES`, `RULES`, `KINDS`, `READERS` or `TRACKERS`.
        name: what users write in a config.
        entry: docs/extending.md has one of each kind.

    Raises `UserError` for a name that is taken.
    """
    if name in table:
        raise UserError(f"{name} is registered already: give yours another name")
    table[name] = entry


def load_plugins(modules: Iterable[str]) -> None:
    """Import modules of the user's, also from the current folder. Raises `UserError`."""
    if "" not in sys.path and os.getcwd() not in sys.path:  # the command `torchmars` lacks it
        sys.path.append(os.getcwd())
    for module in modules:
        try:
            importlib.import_module(module)
        except (Exception, SystemExit) as error:
            raise UserError(
                f"--plugins or run.plugins: cannot import {module} ({type(error).__name__}: "
                f"{error}): name a module as Python does, in this folder or one of PYTHONPATH, "
                "and mend what it raises"
            ) from None
