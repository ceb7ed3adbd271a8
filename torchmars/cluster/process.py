"""This process among all ranks, by the variables that torchrun and a scheduler set.

They are known before the ranks connect.
"""

import contextlib
import os
import resource
import socket
from datetime import timedelta
from typing import Annotated

from torchmars.cluster.environment import check_copies, read_variable, start_seconds
from torchmars.cluster.scheduler import NODE, in_batch_job
from torchmars.core.bounds import Range
from torchmars.core.errors import UserError
from torchmars.core.typed import make, whole_number

Number = Annotated[int, Range(0, 100_000_000)]
Port = Annotated[int, Range(0, 65_535)]
# The variable with the file that is the ranks' store where one launcher has started all of them.
STORE_FILE = "TORCHMARS_STORE_FILE"
# The variable with the round in which several machines have met, as MEETING:NUMBER.
ROUND = "TORCHMARS_ROUND"
# The one with the fewest ranks with which an elastic run may go on.
FEWEST = "TORCHMARS_FEWEST_RANKS"
# The one with the folder in which the launcher of such a run leaves notes for its ranks.
NOTES = "TORCHMARS_NOTES"
# The note that the ranks are to end after a step, since machines join the run.
REGROUP = "regroup"
# The one of a signal to the launcher: the signal's name, and how the machine may leave the run.
SIGNAL = "signal"


def rank() -> int:
    """Return this process's number among all ranks; 0 for a process that was started alone."""
    return torchrun_number("RANK", 0)


def world_size() -> int:
    """Return the number of ranks; 1 for a process that was started alone."""
    return torchrun_number("WORLD_SIZE", 1)


def machines() -> int:
    """Return the number of machines, each of which has a launcher."""
    return torchrun_number("GROUP_WORLD_SIZE", 1)


def machine_rank() -> int:
    """Return this machine's number among those whose ranks have started together."""
    return torchrun_number("GROUP_RANK", 0)


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
    if given is None:
        return alone
    return make(Number, whole_number(given), name=name)


def check_variables() -> None:
    """Raise `UserError` unless the variables of a rank are set, as torchrun sets them.

    Or none is there: the process was started alone.
    """
    if "RANK" not in os.environ:
        check_copies(os.environ)
    needed = ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if "RANK" in os.environ else ()
    remedy = "start ranks by torchmars train or torchrun, or unset RANK to train alone"
    if missing := [name for name in needed if name not in os.environ]:
        verb = "is" if len(missing) == 1 else "are"
        raise UserError(f"RANK is set, but {' and '.join(missing)} {verb} not: {remedy}")
    if torchrun_number("RANK", 0) >= world_size() or local_rank() >= world_size():
        raise UserError(f"RANK and LOCAL_RANK must be less than WORLD_SIZE: {remedy}")
    if needed:
        make(Port, torchrun_number("MASTER_PORT", 0), name="MASTER_PORT")


def round_number() -> int:
    """Return the number of the machines' round, which grows; 0 on one machine."""
    return int(os.environ.get(ROUND, "").rpartition(":")[2] or 0)


def meeting() -> str:
    """Return the name of the meeting in which the machines come together; empty on one machine."""
    return os.environ.get(ROUND, "").partition(":")[0]


def note(name: str) -> str | None:
    """Return what the launcher of an elastic run has noted for its ranks; None: nothing.

    The name is `REGROUP` or `SIGNAL`.
    """
    if fewest_ranks() is not None and NOTES in os.environ:
        with contextlib.suppress(OSError), open(os.path.join(os.environ[NOTES], name)) as file:
            return file.read()
    return None


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


def node_rank() -> int | None:
    """Return the number that this machine was given; None if the machines are to find out."""
    given = os.environ.get("NODE_RANK")
    return None if given is None else read_variable("NODE_RANK", given)


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
