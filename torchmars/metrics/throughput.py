"""How fast a run trains, and what its devices can do: tokens per second, MFU, memory, times."""

import contextlib
import resource
import time
from collections.abc import Iterator

import torch

from torchmars.metrics.gpus import GPUS

GIB = 2**30


def peak_flops(device: torch.device) -> float | None:
    """Return the device's peak FLOP/s in bfloat16; None if it is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((gpu.peak_flops for part, gpu in GPUS.items() if part in name), None)


def peak_memory(device: torch.device) -> float:
    """Return the most memory that this rank has had so far, in GiB.

    That is memory of the GPU, or on CPU that of the process. psutil does not know peaks on Linux.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / GIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


class Stopwatch:
    """Times a block of device work without waiting for it.

    `with stopwatch: ...`, and later `stopwatch.milliseconds()`.
    """

    def __init__(self, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self.events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if on_gpu else []
        self.began = self.ended = 0.0

    def __enter__(self) -> None:
        if self.events:
            self.events[0].record()
        else:
            self.began = time.perf_counter()

    def __exit__(self, *exception: object) -> None:
        if self.events:
            self.events[1].record()
        else:
            self.ended = time.perf_counter()

    def milliseconds(self) -> float:
        """Return the time of the last block. On a GPU its work must have ended."""
        if self.events:
            return self.events[0].elapsed_time(self.events[1])
        return (self.ended - self.began) * 1e3


class Throughput:
    """Measures the speed of training from one report to the next."""

    def __init__(
        self,
        step: int,
        tokens_per_step: int,
        flops_per_token: int,
        device: torch.device,
        ranks: int,
    ) -> None:
        """Begin to measure after `step`. `flops_per_token` are those of a forward and backward."""
        self.tokens_per_step = tokens_per_step
        self.flops_per_token = flops_per_token
        peak = peak_flops(device)
        self.peak_flops = peak * ranks if peak else None  # of all ranks
        self.step, self.began = step, time.perf_counter()

    def restart(self, step: int) -> None:
        """Begin anew after `step`."""
        self.step, self.began = step, time.perf_counter()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time of the body out."""
        began = time.perf_counter()
        yield
        self.began += time.perf_counter() - began

    def seconds_per_step(self, step: int) -> float:
        """Return the mean time of the steps since the beginning, up to `step`."""
        return (time.perf_counter() - self.began) / max(step - self.step, 1)

    def mfu(self, tokens_per_second: float) -> float | None:
        """Return the part of the peak FLOP/s that the model uses; None if that is unknown."""
        if self.peak_flops is None:
            return None
        return tokens_per_second * (self.flops_per_token / self.peak_flops)
