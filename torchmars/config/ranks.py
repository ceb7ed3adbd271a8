"""What the ranks of a run derive: dtypes and compilation, once and as long as the run lives."""

from dataclasses import replace
from typing import Any, Literal

import torch

from torchmars.config import Config, ResolvedConfig
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


def resolve_compile(
    config: ResolvedConfig, device: torch.device, able: bool, tp: int, saved: dict[str, Any] | None
) -> ResolvedConfig:
    """Return `config` with `training.compile` resolved.

    Where the config names nothing, it stays as in `saved`, the config of the checkpoint that the
    run resumes from. A new run compiles on a GPU, if all ranks are `able` to, and the rest of the
    config allows it. `tp` is the degree of tensor parallelism.
    """
    compiles = config.training.compile
    if compiles is None and saved is not None:
        compiles = bool(saved["training"]["compile"])
    if compiles is None:
        compiles = is_gpu(device.type) and able and compile_problem(config, tp) is None
    return replace(config, training=replace(config.training, compile=compiles))


def compile_problem(config: Config, tp: int) -> str | None:
    """Return why blocks cannot be compiled under the rest of the config, with the remedy.

    `tp` is the degree of tensor parallelism. None: they can be.
    """
    # torch 2.13 fails: of a block without a tensor to keep, it keeps the mesh.
    if config.activation_checkpoint.mode == "full" and tp > 1:
        return (
            'activation_checkpoint.mode = "full" does not go with training.compile and '
            f'parallelism.tp = {tp}: choose "selective", or training.compile = false'
        )
    return None


def eager_note(config: ResolvedConfig, device: torch.device, able: bool, tp: int) -> str | None:
    """Return why a run on a GPU does not compile its blocks; None if it does, or nothing is odd.

    `config` has `training.compile` resolved.
    """
    if config.training.compile or not is_gpu(device.type):
        return None
    if not able:
        return "blocks are not compiled: a rank has no C compiler, or a GPU too old for Triton"
    problem = compile_problem(config, tp)
    return problem and f"blocks are not compiled: {problem}"
