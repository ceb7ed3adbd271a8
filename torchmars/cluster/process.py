"""This process: its place among all ranks, the signals that stop it, and whom it ends with."""

import contextlib
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from torchmars.cluster.environment import read_variable, start_seconds
from torchmars.cluster.scheduler import NODE
from torchmars.core.errors import UserError

# Variables that a launcher sets for its ranks:
STORE_FILE = "TORCHMARS_STORE_FILE"  # their store where it has started all of them
ROUND = "TORCHMARS_ROUND"  # in which several machines have met, as MEETING:NUMBER
FEWEST = "TORCHMARS_FEWEST_RANKS"  # with which an elastic run may go on
ASKED = "TORCHMARS_ASKED"  # the file that asks them to end: one of `document.ASKS`, and signals
LAUNCHER = "TORCHMARS_LAUNCHER"  # its process number
CALLER = "TORCHMARS_CALLER"  # for launchers: the process number of who has started one
# The first of these signals asks a run to save and end, a second one ends it at once.
STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
ORPHANED = signal.SIGUSR2  # a rank sends it itself when its launcher is gone, as the first
# A launcher passes on a signal that its ranks were sent as well: one request. Ours ends them too.
ECHO_SECONDS = 1.0
ROOT = Path(__file__).parents[2]  # the folder that torchmars is imported from


def rank() -> int:
    """Return this process's number among all ranks; 0 for a process that was started alone."""
    return int(os.environ.get("RANK", 0))


def world_size() -> int:
    """Return the number of ranks; 1 for a process that was started alone."""
    return int(os.environ.get("WORLD_SIZE", 1)) if "RANK" in os.environ else 1


def machines() -> int:
    """Return the number of machines, each of which has a launcher."""
    return int(os.environ.get("GROUP_WORLD_SIZE", 1))


def alone_on_machine() -> bool:
    """Return whether all ranks are on this machine, as their launcher says."""
    return "RANK" not in os.environ or os.environ.get("GROUP_WORLD_SIZE") == "1"


def local_rank() -> int:
    """Return this process's number on its machine; 0 for a process started alone."""
    return int(os.environ.get("LOCAL_RANK", 0))


def meeting() -> tuple[str, int]:
    """Return the name of the machines' meeting and the number of the round; "" and 0 on one."""
    name, _, number = os.environ.get(ROUND, "").partition(":")
    return name, int(number or 0)


def asked() -> tuple[str, str]:
    """Return how the launcher asks its ranks to end after a step, and by which signals; or ""."""
    if ASKED in os.environ:
        with contextlib.suppress(OSError), open(os.environ[ASKED]) as file:
            how, _, signals = file.read().partition(" ")
            return how, signals
    return "", ""


def fewest_ranks() -> int | None:
    """Return with how few ranks the run may go on; None if their number is fixed."""
    fewest = os.environ.get(FEWEST)
    return int(fewest) if fewest else None


def node() -> str:
    """Return the name of this machine."""
    return os.environ.get(NODE) or socket.gethostname()


def start_timeout() -> timedelta:
    """Return how long ranks wait for each other at the start."""
    given = os.environ.get("RDZV_TIMEOUT")
    seconds = read_variable("RDZV_TIMEOUT", given) if given else start_seconds(world_size())
    return timedelta(seconds=seconds)


def allow_open_files() -> None:
    """Let this process open as many files as it may: the first rank has connections with all."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with contextlib.suppress(OSError, ValueError):  # a system that allows less than it says
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def check_devices(local_ranks: int | None = None) -> None:
    """Raise `UserError` if this machine has GPUs, but fewer than ranks; by default torchrun's."""
    local_ranks = local_ranks or int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    from torchmars.core.device import visible_gpus  # it takes torch: the others here need none

    gpus = len(visible_gpus())
    if 0 < gpus < local_ranks:
        raise UserError(
            f"{local_ranks} ranks need as many GPUs, {node()} has {gpus}: "
            f"set NGPU to at most {gpus}"
        )


def stopping() -> list[signal.Signals]:
    """Return the signals that stop this process: not SIGHUP where nohup has made it ignored."""
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [number for number in STOPPING if not (ignored and number == signal.SIGHUP)]


def follow_launcher() -> None:
    """Send this process, a rank, `ORPHANED` once its launcher is gone; let SIGQUIT end it.

    `StopSignals` takes that for a request to save and end; outside of it, it ends the process. Of
    several machines the others go on without this one, so it ends at once.
    """
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)  # of torchrun; a script's background ignores it
    if "TORCHELASTIC_RUN_ID" in os.environ:
        launcher = int(os.environ.get(LAUNCHER, os.getppid()))
        send_once_gone(launcher, ORPHANED if alone_on_machine() else signal.SIGKILL)


def send_once_gone(parent: int, number: int) -> None:
    """Send this process a signal once its parent is gone, by a thread that looks each second."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os.kill(os.getpid(), number)

    threading.Thread(target=watch, name="parent", daemon=True).start()


class StopSignals:
    """Notes the signals that stop a run, on the main thread: `with StopSignals() as signals:`."""

    def __init__(self) -> None:
        self.received: str | None = None  # the first request to stop the run, in words
        self.received_at = 0.0
        self.previous: dict[signal.Signals, Any] = {}  # handlers, by signal

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            for number in (*stopping(), ORPHANED):
                self.previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *exception: Any) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def _receive(self, number: int, _: object = None) -> None:
        orphaned, now = number == ORPHANED, time.monotonic()
        if self.received is None:
            self.received = "the end of its launcher" if orphaned else signal.Signals(number).name
            self.received_at = now
        elif not orphaned and LAUNCHER not in os.environ and now > self.received_at + ECHO_SECONDS:
            os._exit(128 + number)


def found_as_here(variables: Mapping[str, str]) -> dict[str, str]:
    """Return what to change in a process's `variables` so that it imports what this one does.

    It finds this package, installed or not, and no module of the current folder, which an empty
    part of PYTHONPATH means too. The folder of installed packages would come before Python's own.
    """
    paths = variables.get("PYTHONPATH", "").split(os.pathsep)
    if ROOT.name not in ("site-packages", "dist-packages"):
        paths.insert(0, str(ROOT))
    named = os.pathsep.join(dict.fromkeys(filter(None, paths)))
    return {"PYTHONPATH": named, "PYTHONSAFEPATH": "1"}


def start_launcher(
    arguments: list[str], variables: Mapping[str, str], **options: Any
) -> subprocess.Popen[bytes]:
    """Start `torchmars train` with these arguments and variables; it ends with this process.

    Its session is its own: else a terminal would send it Ctrl-C too. `options` are `Popen`'s.
    """
    return subprocess.Popen(
        [sys.executable, "-m", "torchmars", "train", *arguments],
        env={**variables, **found_as_here(variables), CALLER: str(os.getpid())},
        start_new_session=True,
        **options,
    )


def follow_caller() -> None:
    """Let this launcher save and end once the process that started it is gone, if one has."""
    if caller := os.environ.pop(CALLER, None):
        send_once_gone(int(caller), signal.SIGTERM)
