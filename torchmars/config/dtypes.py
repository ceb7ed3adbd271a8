"""The dtypes of a run: "auto" resolved once, for all ranks and as long as the run lives."""

from dataclasses import replace
from typing import Any, Literal

import torch

from torchmars.config import ResolvedConfig
from torchmars.core.device import is_gpu
from torchmars.optim.matrices.agreement import resolve_matrix_dtype

COMPUTE, MATRIX = "training.dtype", "optimizer.matrix_dtype"


def resolve_dtypes(
    config: ResolvedConfig,
    device: torch.device,
    native_bfloat16: bool,
    saved: dict[str, Any] | None = None,
) -> ResolvedConfig:
    """Return `config` with `training.dtype` and `optimizer.matrix_dtype` resolved.

    "auto" becomes its value in `saved`, the config of the checkpoint that the run resumes from. In
    a new run it follows from the kind of `device`, and from whether all ranks multiply bfloat16
    natively (`native_bfloat16`).
    """
    compute: Any = config.training.dtype
    matrix: Any = config.optimizer.matrix_dtype
    if compute == "auto":
        compute = saved["training"]["dtype"] if saved else default_dtype(device)
    if matrix == "auto" and saved:
        matrix = saved["optimizer"]["matrix_dtype"]
    matrix = resolve_matrix_dtype(matrix, native_bfloat16)
    return replace(
        config,
        training=replace(config.training, dtype=compute),
        optimizer=replace(config.optimizer, matrix_dtype=matrix),
    )


def default_dtype(device: torch.device) -> Literal["float32", "bfloat16"]:
    """Return the compute dtype of a kind of device."""
    return "bfloat16" if is_gpu(device.type) else "float32"


def slow_warning(config: ResolvedConfig, matrices: bool) -> str | None:
    """Return a warning for a run of which a rank has no instructions for bfloat16.

    `config` has its dtypes resolved. `matrices` says whether the run has any to orthogonalise.
    Returns None if nothing is in bfloat16.
    """
    slow = {COMPUTE: "float32"} if config.training.dtype == "bfloat16" else {}
    if matrices and config.optimizer.matrix_dtype == "bfloat16":
        slow[MATRIX] = "float32"
    if not slow:
        return None
    remedy = " and ".join(f'{name} = "{dtype}"' for name, dtype in slow.items())
    return (
        f"{' and '.join(slow)} = bfloat16 is slow here, since a device of this run has no "
        f"instructions for it: {remedy} is many times faster"
    )
