"""Whether a run compiles its blocks: resolved once, for all ranks and as long as the run lives."""

from dataclasses import replace
from typing import Any

import torch

from torchmars.config import Config, ResolvedConfig
from torchmars.core.device import is_gpu


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
            f'parallelism.tp = {tp}: choose "selective"'
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
