"""Which rank failed first.

When one dies, the others lose their connections to it and fail too. Those failures mean nothing.
"""

import contextlib
import json
import re
import time
from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import Any

from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from torchmars.cluster import process
from torchmars.cluster.logs import RankLogs
from torchmars.core.device import COLLECTIVES
from torchmars.core.errors import EXIT_HUNG, EXIT_UNCONNECTED
from torchmars.core.files import write_durably

# How long to wait for what the machine whose rank failed first does or reports. torchrun gives that
# machine's other ranks 30 s to end.
WAIT_SECONDS = 35.0
FALLOUT_MESSAGE = re.compile(
    r"LostRank|Dist(Network|Store|Backend)Error|closed by peer|reset by peer|broken pipe|"
    rf"{COLLECTIVES}|timed out|SIGTERM|"
    r"SIGABRT|"  # so NCCL ends a rank that waits for a dead one
    r"RuntimeError: rank \d+: ",  # an error that another rank has raised, see `Layout.on_all`
    re.IGNORECASE,
)

# What errors begin with that need no traceback.
IN_A_LINE = ("LostRank: ", "NoTraffic: ", "OutOfMemory: ", "LoneMistake: ")


class Kind(IntEnum):
    """How much a failure says about its cause. A lower kind says more."""

    CAUSE = 0
    SYMPTOM = 1
    """Ranks wait for one that hangs or cannot be reached. It may have died on another machine."""
    FALLOUT = 2
    """A failure that another rank's failure caused."""


@dataclass
class Failure:
    """How one rank ended."""

    node: str
    rank: int
    code: int
    """Its exit code; minus the number of the signal that ended it."""
    time: float
    """Seconds since 1970."""
    message: str
    kind: Kind

    @property
    def line(self) -> str:
        """The last line of its message: the error without its place."""
        return self.message.rstrip().rpartition("\n")[2].removeprefix("error: ")


def failure_of(rank: int, ended: ProcessFailure, last_lines: list[str]) -> Failure:
    """Return the failure of a rank that ended with an error, after it had printed `last_lines`."""
    if isinstance(ended.message, dict):  # written by @record
        error = ended.message["message"]
        text = ended.message["extraInfo"]["py_callstack"].rstrip()
        if error.startswith(IN_A_LINE):
            text = f"error: {error.partition(': ')[2]}"
    else:
        killed = ended.exitcode < 0
        error = ended.message if killed else f"it ended with exit code {ended.exitcode}"
        if not killed and last_lines:  # the last one may say why
            *last_lines, why = last_lines
            text = "\n".join([*last_lines, f"{why}; {error}"])
        else:
            text = "\n".join([*last_lines, error])
    kind = Kind.FALLOUT if FALLOUT_MESSAGE.search(error) else Kind.CAUSE
    if error.startswith("NoTraffic: "):
        kind = Kind.SYMPTOM
    return Failure(process.node(), rank, ended.exitcode, float(ended.timestamp), text, kind)


def hang_of(rank: int, ended: ProcessFailure, report: str) -> Failure:
    """Return the failure of a rank that ended since it, or another one, hung.

    `report` says where all ranks stand.
    """
    return Failure(process.node(), rank, EXIT_HUNG, float(ended.timestamp), report, Kind.SYMPTOM)


def lost_machines(reason: str) -> Failure:
    """Return the failure of a machine that has only lost the others."""
    text = f"error: {process.node()} has lost the other machines: {reason}"
    return Failure(process.node(), -1, EXIT_UNCONNECTED, time.time(), text, Kind.FALLOUT)


def first_here(ours: list[Failure]) -> Failure:
    """Return the failure of the rank of this machine that failed first.

    Here a symptom counts as a cause: torchrun has killed the ranks that did not end.
    """
    return min(ours, key=lambda failure: (failure.kind == Kind.FALLOUT, failure.time, failure.rank))


def first_failure(ours: list[Failure], logs: RankLogs, clock: Any = time) -> Failure:
    """Return the failure of the rank that failed first, on any machine.

    The machines exchange failures by files beside the logs, under a name of this launch.
    """
    mine = first_here(ours)
    folder, known = logs.folder / "failures", [mine]
    # The folder may not be writable, a file half written.
    with contextlib.suppress(OSError, ValueError, TypeError):
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"{logs.launch}-{mine.node}-{mine.rank}.json"
        write_durably(file, json.dumps(asdict(mine)))
        deadline = clock.monotonic() + WAIT_SECONDS
        while len(known) < logs.machines and all(failure.kind for failure in known):
            if clock.monotonic() > deadline:
                break
            clock.sleep(0.2)
            files = folder.glob(f"{logs.launch}-*.json")
            known = [Failure(**json.loads(file.read_text())) for file in files]
    return min(known, key=lambda failure: (failure.kind, failure.time, failure.rank))
