"""The device of these tests. Without a GPU their code can still be run on the CPU, in small."""

import contextlib
from collections.abc import Iterator
from typing import TypeVar

import torch

T = TypeVar("T")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ON_GPU = DEVICE.type == "cuda"


def sized(on_gpu: T, on_cpu: T) -> T:
    """Return the size that tells something on a GPU, or the one that a CPU can do in no time."""
    return on_gpu if ON_GPU else on_cpu


@contextlib.contextmanager
def without_waiting() -> Iterator[None]:
    """Let whatever waits for the GPU in the body raise an error."""
    if not ON_GPU:
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
