"""This process: its place among all ranks, the signals that stop it, and whom it ends with.

The place is known before the ranks connect, by the variables of launchers and a scheduler.
"""

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
from typing import Annotated, Any

from torchmars.cluster.environment import check_copies, read_variable, start_seconds
from torchmars.cluster.scheduler import NODE, in_batch_job
from torchmars.core.check import Range, make, whole_number
from torchmars.core.errors import UserError

Number = Annotated[int, Range(0, 100_000_000)]
Port = Annotated[int, Range(0, 65_535)]
# Variables that a launcher sets for its ranks:
STORE_FILE = "TORCHMARS_STORE_FILE"  # their store where it has started all of them
ROUND = "TORCHMARS_ROUND"  # in which several machines have met, as MEETING:NUMBER
FEWEST = "TORCHMARS_FEWEST_RANKS"  # with which an elastic run may go on
ASKED = "TORCHMARS_ASKED"  # the file that asks them to end: one of `document.ASKS`, and signals
LAUNCHER = "TORCHMARS_LAUNCHER"  # its process number
CALLER = "TORCHMARS_CALLER"  # for launchers: the process number of who has started one
# The first of these signals asks a run to save and end, a second one ends it at once. SLURM sends
# USR1 before the time limit, where a job asks for it.
STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
# The one that a rank sends itself when its launcher is gone, which counts as the first.
ORPHANED = signal.SIGUSR2
# A launcher passes on a signal that its ranks were sent as well. That is one request, not two.
ECHO_SECONDS = 1.0
ROOT = Path(__file__).parents[2]  # the folder that torchmars is imported from


def rank() -> int:
    """Return this process's number among all ranks; 0 for a process that was started alone."""
    return torchrun_number("RANK", 0)


def world_size() -> int:
    """Return the number of ranks; 1 for a process that was started alone."""
    return torchrun_number("WORLD_SIZE", 1)


def machines() -> int:
    """Return the number of machines, each of which has a launcher."""
    return torchrun_number("GROUP_WORLD_SIZE", 1)


def alone_on_machine() -> bool:
    """Return whether all ranks are on this machine, as far as their launcher says so."""
    return "RANK" not in os.environ or os.environ.get("GROUP_WORLD_SIZE") == "1"


def local_rank() -> int:
    """Return this process's number on its machine; 0 for a process started alone."""
    return torchrun_number("LOCAL_RANK", 0)


def torchrun_number(name: str, alone: int) -> int:
    """Return a variable that torchrun sets, or its value for a process started `alone`.

    Raises `UserError` for a value that torchrun would not set.
    """
    given = os.environ.get(name)
    return alone if given is None else make(Number, whole_number(given), name=name)


def check_variables() -> None:
    """Raise `UserError` unless the variables of a rank are set, as torchrun sets them.

    Or none is there: the process was started alone.
    """
    if "RANK" not in os.environ:
        return check_copies(os.environ)
    needed = ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    remedy = "start ranks by torchmars train or torchrun, or unset RANK to train alone"
    for name in needed:
        if name not in os.environ:
            raise UserError(f"RANK is set, but {name} is not: {remedy}")
    if rank() >= world_size() or local_rank() >= world_size():
        raise UserError(f"RANK and LOCAL_RANK must be less than WORLD_SIZE: {remedy}")
    make(Port, torchrun_number("MASTER_PORT", 0), name="MASTER_PORT")


def round_number() -> int:
    """Return the number of the machines' round, which grows; 0 on one machine."""
    return int(os.environ.get(ROUND, "").rpartition(":")[2] or 0)


def meeting() -> str:
    """Return the name of the meeting in which the machines come together; empty on one machine."""
    return os.environ.get(ROUND, "").partition(":")[0]


def asked() -> tuple[str, str]:
    """Return how the launcher asks its ranks to end after a step, and by which signals; or ""."""
    if ASKED in os.environ:
        with contextlib.suppress(OSError), open(os.environ[ASKED]) as file:
            how, _, signals = file.read().partition(" ")
            return how, signals
    return "", ""


def may_meet_later() -> bool:
    """Return whether machines that have not met are no mistake: others may be there next time."""
    return in_batch_job(os.environ) or fewest_ranks() is not None


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
    if given is None:
        return timedelta(seconds=start_seconds(world_size()))
    return timedelta(seconds=read_variable("RDZV_TIMEOUT", given))


def allow_open_files() -> None:
    """Let this process open as many files as the system allows.

    The first rank has a connection with every other one, and systems begin with 1,024 files.
    """
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with contextlib.suppress(OSError, ValueError):  # a system that allows less than it says
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def local_gpus() -> int:
    """Return how many GPUs this process may use."""
    from torchmars.core.device import gpu_count  # it takes torch, which the others here need not

    return gpu_count()


def check_devices(local_ranks: int | None = None) -> None:
    """Raise `UserError` if this machine has GPUs, but fewer than ranks.

    `local_ranks` is the number of ranks on it, by default torchrun's.
    """
    local_ranks = local_ranks or torchrun_number("LOCAL_WORLD_SIZE", 1)
    gpus = local_gpus()
    if 0 < gpus < local_ranks:
        raise UserError(
            f"{local_ranks} ranks need as many GPUs, {node()} has {gpus}: "
            f"set NGPU to at most {gpus}"
        )


def stopping() -> list[signal.Signals]:
    """Return the signals that stop this process.

    SIGHUP is not among them where nohup, or another parent, has made it ignored.
    """
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [number for number in STOPPING if not (ignored and number == signal.SIGHUP)]


def follow_launcher() -> None:
    """Send this process, a rank, `ORPHANED` once its launcher is gone; let SIGQUIT end it.

    `StopSignals` takes that for a request to save and end. Outside of it, it ends the process. Of
    several machines the others go on without this one, so the process ends at once. A process that
    was started alone has no launcher.
    """
    # torchrun may end its ranks by SIGQUIT, which processes ignore that a script starts in the
    # background.
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
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
    """Catches the signals in this process: `with StopSignals() as signals: ...`.

    A thread takes them. Python's own handlers wait for the main thread, which may be in a
    collective that never ends: then a second signal would not end the rank. Where the run is not on
    the main thread itself, in a program of the user's, that program has the signals.
    """

    def __init__(self) -> None:
        self.received: str | None = None  # the first request to stop the run, in words
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
        threading.Thread(target=self._listen, args=(read, caught), daemon=True).start()
        for number in caught:
            self.previous[number] = signal.signal(number, lambda number, frame: None)
        return self

    def __exit__(self, *exception: Any) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)
        if self.pipe is not None:  # its end ends the thread
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


def found_as_here(variables: Mapping[str, str]) -> dict[str, str]:
    """Return what to change in a process's `variables` so that it imports what this one does.

    It finds this package, installed or not, and no module of the current folder: a `random.py`
    there would be taken for Python's. An empty part of PYTHONPATH means that folder too. The folder
    of installed packages is not named: it would come before Python's own.
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

    A notebook that is killed can stop nothing: its run would train on for nobody. The launcher is
    in a session of its own: else a terminal would send it Ctrl-C too. `options` are `Popen`'s.
    """
    return subprocess.Popen(
        [sys.executable, "-m", "torchmars", "train", *arguments],
        env={**variables, **found_as_here(variables), CALLER: str(os.getpid())},
        start_new_session=True,
        **options,
    )


def follow_caller() -> None:
    """Send this process, a launcher, SIGTERM once the process that started it is gone.

    It then saves. One that was started by hand follows nobody.
    """
    caller = os.environ.pop(CALLER, None)
    if caller is not None:
        send_once_gone(int(caller), signal.SIGTERM)
