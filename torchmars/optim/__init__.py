"""The MARS optimizers, their rules and groups.

This package needs torch only, and is usable without the rest of torchmars. It imports torch when
one of its names is first used: the config reads what rules declare (`optim.rules`) without.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchmars.optim.groups import param_groups
    from torchmars.optim.mars import MARS
    from torchmars.optim.scaling import transfer_factors
    from torchmars.optim.schedules import lr_factor

__all__ = ["MARS", "lr_factor", "param_groups", "transfer_factors"]

_FILES = {
    "MARS": "mars",
    "lr_factor": "schedules",
    "param_groups": "groups",
    "transfer_factors": "scaling",
}


def __getattr__(name: str) -> Any:
    if name not in _FILES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_FILES[name]}"), name)
