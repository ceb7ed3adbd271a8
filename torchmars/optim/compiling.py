"""What can be compiled on a machine, and whether it pays."""

import functools
import importlib
import logging
import os
import shutil
import sysconfig

import torch
import torch.distributed as dist

logger = logging.getLogger(__name__)

# Local elements of all parameters. A smaller model trains faster than its loops compile.
MIN_MODEL_TO_COMPILE = 2**22


def can_compile(device: torch.device) -> bool:
    """Return whether torch.compile can work here.

    It needs a compiler and the headers of Python: for its own code on a CPU, and for Triton's
    driver on a GPU, which must be one that Triton supports.
    """
    on_gpu = device.type == "cuda"
    compilers = ("gcc", "cc", "clang") if on_gpu else ("g++", "c++", "clang++")
    header = os.path.join(sysconfig.get_path("include"), "Python.h")
    if not (os.path.exists(header) and any(map(shutil.which, compilers))):
        return False
    return not on_gpu or torch.cuda.get_device_capability(device) >= (7, 0) and has_triton()


def has_triton() -> bool:
    """Return whether Triton can be imported."""
    try:
        importlib.import_module("triton")
    except Exception:  # whatever a broken installation raises
        return False
    return True


def has_launches(device: torch.device) -> bool:
    """Return whether there are launches for `device`: for GPUs that compute in bfloat16."""
    if device.type != "cuda" or torch.version.hip is not None or not can_compile(device):
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def is_capturing(device: torch.device) -> bool:
    """Return whether a graph of launches is captured: it would keep addresses and settings."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


@functools.cache
def announce_compilation() -> None:
    """Say once why the first step takes so long; on one rank only."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        logger.warning(
            "compiling the optimizer's kernels: the first step takes some seconds longer. "
            "compile=False does without; in a config it is training.compile = false"
        )
