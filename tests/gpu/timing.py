"""How long a step takes: on the GPU, on the host, and what it starts."""

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity

from tests.gpu.device import ON_GPU, sized
from torchmars.records.gpus import GIB

Step = Callable[[], object]
WARM_UP, ROUNDS = sized(4, 1), sized(3, 1)  # the first steps compile


def synchronize() -> None:
    """Wait for the GPU, where there is one."""
    if ON_GPU:
        torch.cuda.synchronize()


def timed(step: Step, steps: int) -> dict[str, Any]:
    """Return the milliseconds of a step, and what it starts on the GPU.

    "step" is that of `steps` steps, without waiting between them, over their number: the median of
    three. "host" is until the call of a step returns. "busy" is how long kernels and copies run.
    """
    for _ in range(WARM_UP):
        step()
    synchronize()
    if ON_GPU:
        torch.cuda.reset_peak_memory_stats()
    rounds, host = [], []
    for _ in range(ROUNDS):
        rounds.append(between_events(step, steps))
        began = time.perf_counter()
        step()
        host.append(1e3 * (time.perf_counter() - began))
        synchronize()
    kernels = kernels_of(step, 2)
    return {
        "step, ms": statistics.median(rounds),
        "least": min(rounds),
        "most": max(rounds),
        "host, ms": statistics.median(host),
        "busy, ms": sum(each for each, _ in kernels.values()) if ON_GPU else None,
        "launches": sum(count for _, count in kernels.values()) if ON_GPU else None,
        "peak, GiB": torch.cuda.max_memory_allocated() / GIB,
    }


def between_events(step: Step, steps: int) -> float:
    """Return the milliseconds of a step: of `steps` that are not waited for, over their number."""
    if not ON_GPU:
        began = time.perf_counter()
        for _ in range(steps):
            step()
        return 1e3 * (time.perf_counter() - began) / steps
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    for _ in range(steps):
        step()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / steps


def kernels_of(step: Step, steps: int) -> dict[str, tuple[float, float]]:
    """Return the milliseconds and the number of each kernel and copy of a step, by name."""
    kinds = [ProfilerActivity.CUDA] if ON_GPU else [ProfilerActivity.CPU]
    with torch.profiler.profile(activities=kinds) as profile:
        for _ in range(steps):
            step()
        synchronize()
    found: dict[str, tuple[float, float]] = {}
    for event in profile.events():
        if event.device_type == (DeviceType.CUDA if ON_GPU else DeviceType.CPU):
            milliseconds, count = found.get(event.name, (0.0, 0.0))
            took = event.time_range.elapsed_us() / 1e3
            found[event.name] = milliseconds + took / steps, count + 1 / steps
    return found


def forget() -> None:
    """Free what the last contender has left."""
    gc.collect()
    torch.compiler.reset()
    if ON_GPU:
        torch.cuda.empty_cache()
