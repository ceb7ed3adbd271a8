"""Pretraining of large models with the MARS family of optimizers, the same run on every layout."""

import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchmars.api import LanguageModel as LanguageModel
    from torchmars.api import Planned as Planned
    from torchmars.api import load as load
    from torchmars.api import make_plan as make_plan
    from torchmars.api import run_training as run_training
    from torchmars.config.plugins import register as register
    from torchmars.core.errors import UserError as UserError
    from torchmars.optim import MARS as MARS
    from torchmars.optim import param_groups as param_groups
    from torchmars.optim import transfer_factors as transfer_factors
    from torchmars.records.run import Run as Run
    from torchmars.records.run import read_run as read_run

__version__ = "0.1.0"
# Where each other public name is. It is imported when it is first used: torch takes seconds.
PLACES = {
    "LanguageModel": "torchmars.api",
    "Planned": "torchmars.api",
    "MARS": "torchmars.optim",
    "Run": "torchmars.records.run",
    "UserError": "torchmars.core.errors",
    "load": "torchmars.api",
    "make_plan": "torchmars.api",
    "param_groups": "torchmars.optim",
    "read_run": "torchmars.records.run",
    "register": "torchmars.config.plugins",
    "run_training": "torchmars.api",
    "transfer_factors": "torchmars.optim",
}
__all__ = [*PLACES, "__version__"]

# A command is being started, not a program that imports this: by `torchmars ...`, or by
# `python -m torchmars ...`, of which sys.argv has -m until Python has found the file.
if Path(sys.argv[0]).name in ("-m", "torchmars"):
    from torchmars.begin import begin

    begin()


def __getattr__(name: str) -> Any:
    if name not in PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(PLACES[name]), name)


def __dir__() -> list[str]:
    return __all__
