"""torchrun's agent of one machine, which starts the ranks again after one has died."""

from collections.abc import Mapping
from typing import Any, Protocol

from torch.distributed.elastic.agent.server import RunResult, WorkerGroup
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousStateError


class Restarting(Protocol):
    """The interface between an agent and the run whose ranks it restarts."""

    def progressed(self) -> bool:
        """Return whether the run got further than at any failure before."""

    def tell(self, ended: Mapping[int, ProcessFailure], left: int) -> None:
        """Say why all ranks restart: `ended` are the ranks of this machine that died, if any.

        They may do so `left` more times without progress.
        """


class Agent(LocalElasticAgent):
    """An agent whose count of restarts starts again whenever the run has made progress.

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
