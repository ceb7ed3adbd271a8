"""Whether kernels make steps, and the object that makes them."""

import importlib
import logging
from typing import TYPE_CHECKING

import torch

from torchmars.optim.kernels import announce_compilation, can_compile
from torchmars.optim.plans import Plans

if TYPE_CHECKING:
    from torchmars.optim.gpu.kernel_step import KernelStep

logger = logging.getLogger(__name__)


def has_kernels(device: torch.device) -> bool:
    """Return whether there are kernels for `device`: for GPUs that compute in bfloat16."""
    if device.type != "cuda" or torch.version.hip is not None or not can_compile(device):
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def steps_by_kernels(plans: Plans) -> "KernelStep | None":
    """Return the maker of steps by kernels; None, with a warning, if Triton cannot compile one.

    It needs a cache that it can write to, CUDA's library and a linker, and says so only when it
    compiles. Here a rank can still do without: others may not.
    """
    announce_compilation()
    try:
        found: KernelStep = importlib.import_module("torchmars.optim.gpu.kernel_step").KernelStep(
            plans
        )
        found.try_one()
    except Exception as error:  # whatever an installation raises that lacks something
        line = " ".join(str(error).split())[:200]
        logger.warning(
            "the optimizer's kernels cannot be compiled by Triton here, and steps take longer: "
            f"{type(error).__name__}: {line}; set TRITON_CACHE_DIR to a folder that can be "
            "written, or compile=False, in a config training.compile = false"
        )
        return None
    return found
