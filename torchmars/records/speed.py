"""How fast a run trains, and how well it uses its devices: tokens per second, MFU, memory.

And where the time of a step goes, measured without waiting for the device.
"""

import contextlib
import resource
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from typing import Any

import torch

from torchmars.core.device import is_gpu
from torchmars.records.gpus import GIB, PEAK_FLOPS

# Time besides training: validation, evaluation, saves.
PAUSED = "paused"
# The time between the other phases: agreement of the ranks, reports.
OTHER = "other"


class PhaseClock:
    """Adds up the time of each phase of training. Each moment is in the phase entered last.

    On a GPU these are times of the device: a phase begins when the device has done all that was
    queued before it. So a phase that the device need not wait for takes no time.
    """

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = is_gpu(device.type)
        self.device_module = torch.get_device_module(device)
        self.seconds: defaultdict[str, float] = defaultdict(float)
        # The phases that are not yet counted, and when they began. The last one has not ended.
        self.entered: deque[tuple[str, Any]] = deque()
        self.enter(OTHER)

    def enter(self, phase: str) -> None:
        """End the current phase, and begin another one."""
        moment: Any = time.perf_counter()
        if self.on_gpu:
            moment = self.device_module.Event(enable_timing=True)
            moment.record()
        self.entered.append((phase, moment))
        self._count()

    def restart(self) -> None:
        """Begin to add up from zero."""
        self.enter(self.entered[-1][0])
        self.seconds.clear()

    def milliseconds(self, steps: int) -> dict[str, float]:
        """Return the mean time of each phase, except pauses, over `steps` steps, by name.

        On a GPU they cover the work that is done by now.
        """
        self.enter(self.entered[-1][0])
        return {
            phase: 1e3 * seconds / steps
            for phase, seconds in self.seconds.items()
            if phase != PAUSED
        }

    def _count(self) -> None:
        """Count the phases whose end has come."""
        while len(self.entered) > 1:
            (phase, began), (_, ended) = self.entered[0], self.entered[1]
            if self.on_gpu and not ended.query():
                return
            self.seconds[phase] += began.elapsed_time(ended) / 1e3 if self.on_gpu else ended - began
            self.entered.popleft()


def peak_flops(device: torch.device) -> float | None:
    """Return the device's peak FLOP/s in bfloat16; None if it is not known."""
    if not is_gpu(device.type):
        return None
    return PEAK_FLOPS.get(torch.get_device_module(device).get_device_name(device))


def mfu_note(device: torch.device) -> str | None:
    """Return a line where a GPU's peak is not known; None where it is, and for CPUs."""
    if not is_gpu(device.type) or peak_flops(device):
        return None
    name = torch.get_device_module(device).get_device_name(device)
    return f"no MFU is reported: the peak of this GPU is not known ({name})"


def peak_memory(device: torch.device) -> float:
    """Return the most memory that this rank has had so far, in GiB.

    That is memory of the GPU, or on a CPU of the process. psutil does not know peaks on Linux.
    """
    if is_gpu(device.type):
        return torch.get_device_module(device).max_memory_allocated(device) / GIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


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
        """Begin to measure after `step`. `flops_per_token` are for a forward and backward pass."""
        self.tokens_per_step = tokens_per_step
        self.flops_per_token = flops_per_token
        peak = peak_flops(device)
        self.peak_flops = peak * ranks if peak else None  # of all ranks
        self.phases = PhaseClock(device)
        self.restart(step)

    def restart(self, step: int) -> None:
        """Begin again after `step`."""
        self.phases.restart()
        self.step, self.began = step, time.perf_counter()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time of the body out."""
        began = time.perf_counter()
        self.phases.enter(PAUSED)
        yield
        self.phases.enter(OTHER)
        self.began += time.perf_counter() - began

    def seconds_per_step(self, step: int) -> float:
        """Return the mean time of the steps since the beginning, up to `step`."""
        return (time.perf_counter() - self.began) / self._steps(step)

    def milliseconds(self, step: int) -> dict[str, float]:
        """Return the same time by its phases, each in milliseconds."""
        return self.phases.milliseconds(self._steps(step))

    def _steps(self, step: int) -> int:
        return max(step - self.step, 1)

    def mfu(self, tokens_per_second: float) -> float | None:
        """Return the part of the peak FLOP/s that the model uses; None if that is unknown."""
        if self.peak_flops is None:
            return None
        return tokens_per_second * (self.flops_per_token / self.peak_flops)
