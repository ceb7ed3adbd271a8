"""Stopping a run from outside.

The first signal asks it to save and end, a second one ends it at once. Those signals are SIGTERM,
SIGINT, SIGUSR1 and SIGHUP. The end of the launcher counts as the first.
"""

import os
import signal
import socket
import threading
import time
from typing import Any

# SLURM sends USR1 before the time limit, where a job asks for it.
STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
# The signal that a rank sends itself when its launcher is gone.
ORPHANED = signal.SIGUSR2
# A launcher passes on a signal that its ranks were sent as well. That is one request, not two.
ECHO_SECONDS = 1.0
# The environment variable with the process number of the launcher, for its ranks.
LAUNCHER = "TORCHMARS_LAUNCHER"


def stopping() -> list[signal.Signals]:
    """Return the signals that stop this process.

    SIGHUP is not among them where nohup, or another parent, has made it ignored.
    """
    return [
        number
        for number in STOPPING
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN
    ]


def follow_launcher() -> None:
    """Send this process, a rank, `ORPHANED` once its launcher is gone; let SIGQUIT end it.

    `StopSignals` takes that for a request to save and end. Outside of it, it ends the process. Of
    several machines the others go on without this one, so the process ends at once. A process that
    was started alone has no launcher.
    """
    # A launcher ends its ranks by SIGQUIT. Processes that a script starts in the background ignore
    # it.
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    under_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
    launcher = int(os.environ.get(LAUNCHER, os.getppid())) if under_torchrun else None

    if launcher is not None:
        several = os.environ.get("GROUP_WORLD_SIZE", "1") != "1"
        send_once_gone(launcher, signal.SIGKILL if several else ORPHANED)


def send_once_gone(parent: int, number: int) -> None:
    """Send this process a signal once its parent is gone, by a thread that looks each second."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os.kill(os.getpid(), number)

    threading.Thread(target=watch, name="parent", daemon=True).start()


class StopSignals:
    """Catches the signals in this process: `with StopSignals() as signals: ...`.

    A thread takes them. Python's own handlers wait for the main thread, which may be in a
    collective that never ends: then a second signal would not end the rank. Where the run is not on
    the main thread itself, in a program of the user's, that program has the signals.
    """

    def __init__(self) -> None:
        self.received: str | None = None
        """The first request to stop the run, in words."""
        self.received_at = 0.0
        self.previous: dict[signal.Signals, Any] = {}  # handlers, by signal
        self.previous_pipe = -1
        self.pipe: socket.socket | None = None

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is not threading.main_thread():
            return self
        caught = (*stopping(), ORPHANED)
        read, self.pipe = socket.socketpair()
        self.pipe.setblocking(False)
        # Python writes the number of each signal that it handles there at once, on any thread.
        self.previous_pipe = signal.set_wakeup_fd(self.pipe.fileno(), warn_on_full_buffer=False)
        listener = threading.Thread(target=self._listen, args=(read, caught), daemon=True)
        listener.start()
        for number in caught:
            self.previous[number] = signal.signal(number, lambda number, frame: None)
        return self

    def __exit__(self, *exception: Any) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)
        self._close_pipe()

    def _close_pipe(self) -> None:
        """Give up the pipe, which ends the thread."""
        if self.pipe is not None:
            signal.set_wakeup_fd(self.previous_pipe)
            self.pipe.close()
            self.pipe = None

    def _listen(self, read: socket.socket, caught: tuple[signal.Signals, ...]) -> None:
        with read:
            while numbers := read.recv(1):
                if numbers[0] in caught:
                    self._receive(numbers[0])

    def _receive(self, number: int) -> None:
        if self.received is None:
            orphaned = number == ORPHANED
            self.received = "the end of its launcher" if orphaned else signal.Signals(number).name
            self.received_at = time.monotonic()
        elif number != ORPHANED and time.monotonic() - self.received_at > ECHO_SECONDS:
            os._exit(128 + number)
