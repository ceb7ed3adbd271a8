"""Which rank failed first. When one dies, the others lose their connections to it and fail too: that says nothing."""

import contextlib
import json
import re
import time
from dataclasses import asdict, dataclass
from enum import IntEnum

from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from torchmars.cluster import process
from torchmars.cluster.logs import RankLogs
from torchmars.core.errors import EXIT_HUNG
from torchmars.core.files import write_durably

WAIT_SECONDS = 35.0  # for the word of the machine whose rank failed first: torchrun gives that one's other ranks 30 to end
# SIGABRT: so NCCL ends a rank that waits for a dead one.
# "rank 3: ": an error that another rank has told this one.
FALLOUT = re.compile(
    r"LostRank|Dist(Network|Store|Backend)Error|closed by peer|reset by peer|"
    r"broken pipe|gloo|NCCL|timed out|SIGTERM|SIGABRT|RuntimeError: rank \d+: ",
    re.IGNORECASE,
)


class Kind(IntEnum):
    """What a failure says of its cause. A lower kind says more."""

    CAUSE = 0
    SYMPTOM = 1
    """Ranks wait for one that hangs or cannot be reached. It may have died on another machine."""
    FALLOUT = 2
    """What another rank's failure has done to this one."""


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
    def consequence(self) -> bool:
        """Whether the cause may be another rank's failure."""
        return self.kind != Kind.CAUSE


def failure_of(rank: int, ended: ProcessFailure, last_lines: list[str]) -> Failure:
    """What torchrun knows of a rank that ended with an error, after it had printed `last_lines`."""
    said = ended.message
    if isinstance(said, dict):  # what @record wrote
        told = said["message"]
        text = said["extraInfo"]["py_callstack"].rstrip()
        if told.startswith(("LostRank: ", "NoTraffic: ")):  # a line says it all
            text = f"error: {told.partition(': ')[2]}"
    else:
        told = said if ended.exitcode < 0 else f"it ended with exit code {ended.exitcode}"
        text = "\n".join([*last_lines, told])
    kind = Kind.FALLOUT if FALLOUT.search(told) else Kind.CAUSE
    if told.startswith("NoTraffic: "):
        kind = Kind.SYMPTOM
    return Failure(process.node(), rank, ended.exitcode, float(ended.timestamp), text, kind)


def hang_of(rank: int, ended: ProcessFailure, report: str) -> Failure:
    """A rank that ended since it, or another one, hung. `report` says where all ranks stand."""
    return Failure(process.node(), rank, EXIT_HUNG, float(ended.timestamp), report, Kind.SYMPTOM)


def lost_machines(reason: str) -> Failure:
    """The failure of a machine that has only lost the others."""
    text = f"error: {process.node()} has lost the other machines: {reason}"
    return Failure(process.node(), -1, 1, time.time(), text, Kind.FALLOUT)


def first_failure(ours: list[Failure], logs: RankLogs) -> Failure:
    """The rank that failed first, on any machine: they tell each other by files beside the logs, under a name of this launch."""
    # Here a symptom is a cause: what torchrun has killed since it did not end is what came of it.
    mine = min(ours, key=lambda failure: (failure.kind == Kind.FALLOUT, failure.time, failure.rank))
    folder, known = logs.folder / "failures", [mine]
    with contextlib.suppress(
        OSError, ValueError, TypeError
    ):  # a folder that cannot be written, a file that is half there
        folder.mkdir(parents=True, exist_ok=True)
        write_durably(
            folder / f"{logs.launch}-{mine.node}-{mine.rank}.json", json.dumps(asdict(mine))
        )
        deadline = time.monotonic() + WAIT_SECONDS
        while len(known) < logs.machines and all(failure.consequence for failure in known):
            if time.monotonic() > deadline:
                break
            time.sleep(0.2)
            known = [
                Failure(**json.loads(file.read_text()))
                for file in folder.glob(f"{logs.launch}-*.json")
            ]
    return min(known, key=lambda failure: (failure.kind, failure.time, failure.rank))
