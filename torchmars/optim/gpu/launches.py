"""How kernels are launched, and a GPU's facts."""

from typing import Any

import torch
from torch import Tensor


def launch(kernel: Any, programs: int, *arguments: Any, **form: tuple) -> None:
    """Start so many `programs` of a Triton kernel on the current stream.

    All launches come through here: a stub in its place does what the host does, without a GPU.
    """
    if programs:
        with torch.cuda.device_of(arguments[0]):
            # Without fusion a product is rounded before it is added to, as on a CPU.
            kernel[(programs,)](*arguments, num_warps=4, enable_fp_fusion=False, **form)


def sums_in_float64(device: torch.device) -> bool:
    """Return whether a GPU adds up in float64 as fast as it reads.

    Those for data centers do, except some, such as L40S (8.9) and B300 (10.3). Others have a 32nd
    or a 64th of float32's speed.
    """
    fast = (7, 0), (8, 0), (9, 0), (10, 0)
    return device.type != "cuda" or torch.cuda.get_device_capability(device) in fast


def is_capturing(device: torch.device) -> bool:
    """Return whether a graph of launches is captured: it would keep addresses and settings."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def sent(values: Tensor, device: torch.device) -> Tensor:
    """Return a copy on a device, without waiting.

    It is read from pinned memory of its own, which torch's allocator gives to nobody until it is
    read: the host runs ahead.
    """
    if device.type == "cuda":
        values = values.pin_memory()
    return values.to(device, non_blocking=True)
