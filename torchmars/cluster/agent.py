"""torchrun's agent of one machine, which starts the ranks again after one has died."""

import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed import DistError
from torch.distributed.elastic.agent.server import RunResult, WorkerGroup
from torch.distributed.elastic.agent.server.api import DEFAULT_ROLE
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousStateError

from torchmars.cluster.failures import Failure, failure_of, first_here, hang_of
from torchmars.cluster.hangs import hang_report, was_blocked
from torchmars.cluster.logs import RankLogs
from torchmars.core.console import say
from torchmars.core.errors import EXIT_HUNG


@dataclass
class Restarts:
    """Whether a run makes progress, and why all its ranks start again.

    The first fields are parameters of `launch`.
    """

    logs: RankLogs
    hang: Path
    hang_seconds: float
    record: Callable[[Failure], None]
    reached: Callable[[], int]
    furthest: int = 0
    """The last step that was reported when a rank died, of all times."""

    def progressed(self) -> bool:
        """Return whether the run got further than at any failure before."""
        before, self.furthest = self.furthest, max(self.furthest, self.reached())
        return self.furthest > before

    def tell(self, ended: Mapping[int, ProcessFailure], left: int) -> None:
        """Say why all ranks restart: `ended` are the ranks of this machine that died, if any.

        They may do so `left` more times without progress.
        """
        failures = failures_of(ended, self.logs, self.hang, self.hang_seconds)
        why = "those of another machine do"
        if failures:
            first = first_here(failures)
            self.record(first)
            why = f"rank {first.rank} on {first.node} failed ({first.line})"
        more = f"{left} more times without progress" if left else "no more without progress"
        say(f"warning: all ranks start again, since {why}; they may do so {more}", error=True)


class Agent(LocalElasticAgent):
    """An agent whose count of restarts starts again whenever the run has made progress.

    A run of a month may lose many machines. One that dies at the same step each time may not start
    again without end. Overrides private methods of torch 2.11 to 2.13.
    """

    def __init__(self, *args: Any, restarting: Restarts, **options: Any) -> None:
        super().__init__(*args, **options)
        self.restarting = restarting
        self.failures: Mapping[int, ProcessFailure] = {}

    def _invoke_run(self, role: str = DEFAULT_ROLE) -> RunResult:
        try:
            return super()._invoke_run(role)
        except (RendezvousError, DistError):
            self._shutdown(signal.SIGKILL)  # those who meet may go on: nothing is published here
            raise

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result = super()._monitor_workers(worker_group)
        self.failures = result.failures
        if self.failures and self.restarting.progressed():
            self._remaining_restarts = worker_group.spec.max_restarts
        return result

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        try:
            super()._rendezvous(worker_group)
        except (KeyError, TypeError, ValueError) as error:  # what the machines tell each other
            raise RendezvousStateError(f"it cannot be read: {error}") from None

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        self.restarting.tell(self.failures, self._remaining_restarts)
        super()._restart_workers(worker_group)


def failures_of(
    ended_ranks: Mapping[int, ProcessFailure], logs: RankLogs, hang: Path, hang_seconds: float
) -> list[Failure]:
    """Return the failures of the ranks of this machine."""
    failures = []
    for rank, ended in ended_ranks.items():
        if ended.exitcode == EXIT_HUNG or was_blocked(hang, rank, ended.pid):
            report = hang_report(hang, logs.ranks, hang_seconds)
            failures.append(hang_of(rank, ended, report))
        else:
            failures.append(failure_of(rank, ended, list(logs.last[rank])))
    return failures
