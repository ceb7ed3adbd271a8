"""Which rank failed first. When one dies, the others lose their connections to it and fail too: that says nothing."""

import contextlib
import json
import re
import time
from dataclasses import asdict, dataclass

from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from torchmars.files import write_durably
from torchmars.logs import RankLogs
from torchmars.parallel import mesh

WAIT_SECONDS = 35.0  # for the word of the machine whose rank failed first: torchrun gives that one's other ranks 30 to end
# SIGABRT: so NCCL ends a rank that waits for a dead one. "rank 3: ": an error that another rank has told this one. 70: a rank that hung for another.
CONSEQUENCE = re.compile(r"LostRank|Dist(Network|Store|Backend)Error|closed by peer|reset by peer|broken pipe|gloo|NCCL|timed out|SIGTERM|SIGABRT|"
                         r"RuntimeError: rank \d+: |exit code 70", re.IGNORECASE)


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
    consequence: bool
    """Whether it looks like what another rank's failure has done to it."""

    @property
    def order(self) -> tuple[bool, float, int]:
        """Sorts the causes before the consequences."""
        return self.consequence, self.time, self.rank


def failure_of(rank: int, ended: ProcessFailure, last_lines: list[str]) -> Failure:
    """What torchrun knows of a rank that ended with an error, after it had printed `last_lines`."""
    said = ended.message
    if isinstance(said, dict):  # what @record wrote
        told = said["message"]
        text = told if told.startswith("LostRank") else said["extraInfo"]["py_callstack"].rstrip()
    else:
        told = said if ended.exitcode < 0 else f"it ended with exit code {ended.exitcode}"
        text = "\n".join([*last_lines, told])
    return Failure(mesh.node(), rank, ended.exitcode, float(ended.timestamp), text, bool(CONSEQUENCE.search(told)))


def lost_machines(reason: str) -> Failure:
    """The failure of a machine that has only lost the others."""
    return Failure(mesh.node(), -1, 1, time.time(), f"{mesh.node()} has lost the other machines: {reason}", True)


def first_failure(ours: list[Failure], logs: RankLogs) -> Failure:
    """The rank that failed first, on any machine: they tell each other by files beside the logs, under a name of this launch."""
    mine = min(ours, key=lambda failure: failure.order)
    folder, known = logs.folder / "failures", [mine]
    with contextlib.suppress(OSError, ValueError, TypeError):  # a folder that cannot be written, a file that is half there
        folder.mkdir(parents=True, exist_ok=True)
        write_durably(folder / f"{logs.launch}-{mine.node}-{mine.rank}.json", json.dumps(asdict(mine)))
        deadline = time.monotonic() + WAIT_SECONDS
        while logs.machines > 1 and all(failure.consequence for failure in known) and time.monotonic() < deadline:
            time.sleep(0.2)
            known = [Failure(**json.loads(file.read_text())) for file in folder.glob(f"{logs.launch}-*.json")]
    return min(known, key=lambda failure: failure.order)
