"""torchrun's agent of one machine, which starts the ranks again after one has died."""

from collections.abc import Callable, Mapping
from typing import Any

from torch.distributed.elastic.agent.server import RunResult, WorkerGroup
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

# Is told by which ranks of this machine all ranks start again, and how many more times they may
# without progress. Returns whether the run has made progress since the last time.
Restarting = Callable[[Mapping[int, ProcessFailure], int], bool]


class Agent(LocalElasticAgent):
    """An agent whose count of restarts begins anew whenever the run has made progress.

    A run of a month may lose many machines. One that dies at the same step each time may not start
    again without end. Overrides private methods of torch 2.11 to 2.13.
    """

    def __init__(self, *args: Any, restarting: Restarting, **options: Any) -> None:
        super().__init__(*args, **options)
        self.restarting = restarting
        self.failures: Mapping[int, ProcessFailure] = {}

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result = super()._monitor_workers(worker_group)
        self.failures = result.failures
        return result

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        most = worker_group.spec.max_restarts
        if self.restarting(self.failures, self._remaining_restarts):
            # What made this one necessary counts as the first of the new count.
            self._remaining_restarts = most - bool(self.failures)
        super()._restart_workers(worker_group)
