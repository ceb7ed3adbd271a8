"""The devices that ranks compute on: which ones there are, and what torch does not say of them.

AMD's GPUs have the same type as NVIDIA's. Streams, events, memory and random numbers are asked of
`torch.get_device_module`: events of torch.accelerator let no thread sleep until they happen.
"""

import contextlib
import os
import subprocess

import torch
from torch import Tensor

from torchmars.core.files import own_cores

GPU_TYPE = "cuda"  # the type of the GPUs that runs use, and that plans are for on any machine
VISIBLE = "CUDA_VISIBLE_DEVICES"  # the variable that names those which a process may use
COLLECTIVES = "gloo|nccl"  # a pattern of the names that libraries of collectives have in errors
# The variable that keeps collectives on a network interface: the very one, not all that begin so.
INTERFACE = ("NCCL_SOCKET_IFNAME", "={}")
# Variables, read when the first GPU is used, with which all sums have one order.
DETERMINISTIC = {
    # A workspace for each stream, so that products take the same kernels.
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    # The order follows from the ranks; reduce-scatters are rings.
    "NCCL_ALGO": "allreduce:tree",
    "NCCL_PROTO": "Simple",
    "NCCL_NVLS_ENABLE": "0",  # sums in NVSwitch
    "NCCL_COLLNET_ENABLE": "0",  # sums in the network
}


def is_gpu(device_type: str) -> bool:
    """Return whether a type of device is that of a GPU."""
    return device_type not in ("cpu", "meta")


def gpu_type() -> str | None:
    """Return the type of this machine's GPUs; None where runs use the CPU."""
    return GPU_TYPE if torch.cuda.is_available() else None


def gpu_memory() -> int | None:
    """Return the bytes of memory of this machine's largest GPU, leaving the GPUs alone.

    None where runs use the CPU, or where the maker's program does not tell.
    """
    if not torch.cuda.device_count():
        return None
    ask = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    with contextlib.suppress(OSError, ValueError, subprocess.SubprocessError):
        told = subprocess.run(ask, capture_output=True, text=True, check=True, timeout=60).stdout
        return max(int(size) * 2**20 for size in told.split())
    return None


def describe_machine() -> str:
    """Return what measurements depend on: GPUs, cores and how busy these are, and torch."""
    busy = f"{own_cores()} cores, of which {os.getloadavg()[0]:.2f} were busy in the last minute"
    gpu = torch.cuda.get_device_name(0) if gpu_type() else "cpu"
    return f"{gpu}, {busy}; torch {torch.__version__}"


def visible_gpus() -> list[str]:
    """Return the GPUs that this process may use, by the names that `VISIBLE` takes.

    It leaves them alone: the process may fork later.
    """
    count, named = torch.cuda.device_count(), os.environ.get(VISIBLE)
    return (named.split(",") if named else [str(number) for number in range(count)])[:count]


def multiplies_float8(device: torch.device) -> bool:
    """Return whether a device has instructions that multiply float8."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def pin(memory: Tensor, size: int, device_type: str) -> None:
    """Let a GPU copy to `size` bytes that are in use already, while the host goes on."""
    if device_type == GPU_TYPE:
        torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), size, 0)


def add_up_in_float32() -> None:
    """Let GPUs add up products of 16-bit numbers in float32 alone."""
    products = torch.backends.cuda.matmul
    products.allow_bf16_reduced_precision_reduction = False
    products.allow_fp16_reduced_precision_reduction = False
