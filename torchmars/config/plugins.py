"""Plugins: modules of the user's own that register models, update rules and kinds of data.

Importing one runs its code. So only the user names them: in a config that is trained, or by
`--plugins`. Plugins named by a checkpoint or another file of a run are never imported.
"""

import contextlib
import importlib
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torchmars.config.entries import TABLES, check_tables
from torchmars.config.run import Modules
from torchmars.core.errors import UserError, place_of
from torchmars.core.options import words
from torchmars.core.typed import make


@dataclass(kw_only=True)
class PluginOptions:
    """Base of the options of commands that read a model of a run. Making it loads the plugins."""

    plugins: str | None = None
    """Modules of yours, with commas between, that register the model: docs/extending.md."""

    def __post_init__(self) -> None:
        if self.plugins is not None:
            load_plugins(words(self.plugins, "--plugins"))


def load_plugins(modules: Iterable[str]) -> None:
    """Import modules of the user's, also from the current folder. Raises `UserError`.

    One that fails leaves nothing in the tables: it can be mended and imported again.
    """
    arguments = [*sys.argv]  # what comes after reads them, and the folder's files
    try:
        folder = os.getcwd()
    except OSError as error:
        raise UserError(f"--plugins or run.plugins: the current folder: {error.strerror}") from None
    for module in modules:
        before = {title: dict(table) for title, table in TABLES.items()}
        try:
            if folder not in sys.path:  # the command `torchmars` does not look there
                sys.path.append(folder)
            importlib.import_module(module)
            check_tables(before)
        except BaseException as error:
            for title, table in TABLES.items():
                entries = before.get(title, {})
                table.clear()
                table.update(entries)
            sys.modules.pop(module, None)
            if isinstance(error, KeyboardInterrupt):
                raise
            raise refused(module, error) from None
        finally:
            sys.argv = arguments
            os.chdir(folder)


def refused(module: str, error: BaseException) -> UserError:
    """Return the error of a plugin, whose code may raise anything, also by sys.exit()."""
    if isinstance(error, UserError):
        return UserError(f"the plugin {module} cannot be used: {error}")
    what = type(error).__name__
    with contextlib.suppress(Exception):  # its text may raise too
        what += f": {error}"
    remedy = f"mend {place_of(error)} which raises that"
    if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
        remedy = (
            "name a module as Python does, such as my_module for my_module.py in this folder, or "
            "in one of PYTHONPATH"
        )
    return UserError(f"--plugins or run.plugins: cannot import {module} ({what}): {remedy}")


def not_loaded(tables: dict[str, Any]) -> list[str]:
    """Return the plugins that a config's tables name and that are not imported here.

    The tables may be anybody's, and the names are shown to be typed: none if one is no name.
    """
    run = tables.get("run")
    try:
        named = make(Modules, run.get("plugins", []) if isinstance(run, dict) else [])
    except UserError:
        return []
    return [each for each in named if each not in sys.modules]
