"""Stopping a run from outside: the first SIGTERM, SIGINT or SIGUSR1 asks it to save and end, a second one ends it at once."""

import os
import signal
import time
from types import FrameType
from typing import Any

STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)  # USR1: what SLURM is told to send before the time limit
ECHO_SECONDS = 1.0  # a launcher passes on what its ranks were sent as well: that is one request, not two


def ignore(*unused: Any) -> None:
    """Let this process, a helper of a rank, live on until the rank has saved: launchers signal whole process groups."""
    for number in STOPPING:
        signal.signal(number, signal.SIG_IGN)


class StopSignals:
    """`with StopSignals() as signals:` catches the signals in this process; `signals.received` names the first."""

    def __enter__(self) -> "StopSignals":
        self.received: str | None = None
        self.previous = {number: signal.signal(number, self._receive) for number in STOPPING}
        return self

    def __exit__(self, *exception: Any) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received, self.at = signal.Signals(number).name, time.monotonic()
        elif time.monotonic() - self.at > ECHO_SECONDS:
            os._exit(128 + number)
