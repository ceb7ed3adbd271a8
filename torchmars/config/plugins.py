"""Plugins: modules of the user's own that register models, update rules and kinds of data.

Importing one runs its code. So only the user names them: in a config that is trained, or by
`--plugins`. What a checkpoint or another file of a run says of plugins is never imported.
"""

import importlib
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torchmars.config.run import Modules
from torchmars.core.errors import UserError
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
    """Import modules of the user's, also from the current folder. Raises `UserError`."""
    for module in modules:
        try:
            if os.getcwd() not in sys.path:  # the command `torchmars` does not look there
                sys.path.append(os.getcwd())
            importlib.import_module(module)
        except Exception as error:  # whatever its code raises
            raise UserError(
                f"--plugins or run.plugins: cannot import {module} ({type(error).__name__}: "
                f"{error}): name a module as Python does, such as my_module for my_module.py in "
                "this folder, or in one of PYTHONPATH"
            ) from None


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
