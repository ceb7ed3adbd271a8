"""The device of these tests. Without a GPU their code can still be run on the CPU, by hand."""

import contextlib
from collections.abc import Iterator

import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@contextlib.contextmanager
def without_waiting() -> Iterator[None]:
    """Let whatever waits for the GPU in the body raise an error."""
    if DEVICE.type != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
