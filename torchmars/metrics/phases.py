"""Where the time of a step goes, measured without waiting for the device."""

import time
from collections import defaultdict, deque
from typing import Any

import torch

from torchmars.core.device import is_gpu

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
