"""`training.deterministic`: every sum of a run is added up in one order, on GPUs too.

A sum whose order is left to threads differs in its last bits from time to time. On GPUs these are
sums by atomic additions, kernels that are chosen by their time, and collectives in a switch.
"""

import os
from collections.abc import MutableMapping

import torch

from torchmars.config import TrainingConfig
from torchmars.core.device import MAKERS, add_up_in_float32
from torchmars.core.errors import UserError

CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
VARIABLES = {
    name: value for maker in MAKERS.values() for name, value in maker.deterministic.items()
}
CUBLAS_VALUES = (":4096:8", ":16:8")  # with any other one torch refuses every product


def apply_determinism(
    training: TrainingConfig, variables: MutableMapping[str, str] = os.environ
) -> None:
    """Let this process compute as `training.deterministic` says, before any GPU is used.

    Variables that are set already stay: `kept_variables` names them. Raises `UserError` for a value
    that torch refuses.
    """
    if not training.deterministic:
        return
    if variables.get(CUBLAS, CUBLAS_VALUES[0]) not in CUBLAS_VALUES:
        raise UserError(
            f"training.deterministic needs {CUBLAS} = {' or '.join(CUBLAS_VALUES)}, "
            f"got {variables[CUBLAS]!r}: unset it"
        )
    for name, value in VARIABLES.items():
        variables.setdefault(name, value)
    # An operation that knows no one order raises an error. Torch's compiler then chooses kernels by
    # rules instead of by their time.
    torch.use_deterministic_algorithms(True)
    # Nothing here reads such memory. mypy does not know the name, a property of the module.
    setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # noqa: B010
    add_up_in_float32()


def kept_variables(variables: MutableMapping[str, str] = os.environ) -> str | None:
    """Return in a line which variables are not as `apply_determinism` sets them; None: none is."""
    kept = [
        f"{name} = {variables[name]}"
        for name, value in VARIABLES.items()
        if variables.get(name, value).lower() != value.lower()
    ]
    if not kept:
        return None
    return (
        f"training.deterministic: {', '.join(kept)} was set before and is kept: unset it for the "
        f"value that the tests have"
    )
