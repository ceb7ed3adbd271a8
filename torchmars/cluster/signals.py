"""Stopping a run from outside.

The first signal asks it to save and end, a second one ends it at once. Those signals are SIGTERM,
SIGINT, SIGUSR1 and SIGHUP. The end of the launcher counts as the first.
"""

import os
import signal
import threading
import time
from types import FrameType
from typing import Any

STOPPING = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGUSR1,
)  # USR1: what SLURM is told to send before the time limit
ORPHANED = signal.SIGUSR2  # what a rank sends itself when its launcher is gone
ECHO_SECONDS = (
    1.0  # a launcher passes on what its ranks were sent as well: that is one request, not two
)

LAUNCHER = "TORCHMARS_LAUNCHER"  # names the process number of the launcher, for its ranks


def stopping() -> list[signal.Signals]:
    """The signals that stop this process.

    SIGHUP is not among them where nohup, or another parent, has made it ignored.
    """
    return [
        number
        for number in STOPPING
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN
    ]


def ignore(*unused: Any) -> None:
    """Let this process, a helper of a rank, live on until the rank has saved: launchers signal whole process groups."""
    for number in STOPPING:
        signal.signal(number, signal.SIG_IGN)


def follow_launcher() -> None:
    """Send this process, a rank, `ORPHANED` once its launcher is gone.

    `StopSignals` takes that for a request to save and end. Outside of it, it ends the process.
    A process that was started alone has no launcher.
    """
    under_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
    launcher = int(os.environ.get(LAUNCHER, os.getppid())) if under_torchrun else None

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(1.0)
        os.kill(os.getpid(), ORPHANED)

    if launcher is not None:
        threading.Thread(target=watch, name="launcher", daemon=True).start()


class StopSignals:
    """`with StopSignals() as signals:` catches the signals in this process; `signals.received` names the first."""

    def __enter__(self) -> "StopSignals":
        self.received: str | None = None
        self.previous = {
            number: signal.signal(number, self._receive) for number in (*stopping(), ORPHANED)
        }
        return self

    def __exit__(self, *exception: Any) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received = signal.Signals(number).name
            if number == ORPHANED:
                self.received = "the end of its launcher"
            self.at = time.monotonic()
        elif number != ORPHANED and time.monotonic() - self.at > ECHO_SECONDS:
            os._exit(128 + number)
