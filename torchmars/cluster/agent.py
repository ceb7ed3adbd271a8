"""torchrun's agent of one machine, which starts the ranks again after one has died."""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from torch.distributed import DistError, DistStoreError
from torch.distributed.elastic.agent.server import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.api import DEFAULT_ROLE
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousStateError,
)

from torchmars.cluster import process
from torchmars.cluster.failures import (
    WAIT_SECONDS,
    Failure,
    Kind,
    failure_of,
    first_here,
    hang_of,
)
from torchmars.cluster.hangs import hang_report, was_blocked
from torchmars.cluster.logs import RankLogs
from torchmars.cluster.membership import Membership, unanswered
from torchmars.cluster.signals import ECHO_SECONDS, STOPPING, stopping
from torchmars.core.console import labelled, say
from torchmars.core.errors import (
    EXIT_HUNG,
    EXIT_INTERRUPTED,
    EXIT_LEFT,
    EXIT_MISTAKE,
    EXIT_REGROUP,
)
from torchmars.core.timers import done_in

LEAVE_SECONDS = 10.0  # that a machine which was signalled waits for the others to end
FALLOUTS = 3  # restarts in a row that others cause, without progress, beside those of ranks


class Left(SignalException):
    """This machine has left the run, which goes on on the others, or it had no part in it."""


class EndedElsewhere(Exception):
    """The run has ended on other machines, with an exit code, or else a failure, of its own."""

    def __init__(self, code: int | None) -> None:
        super().__init__()
        self.code = code


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

    def failures(self, ended: Mapping[int, ProcessFailure]) -> list[Failure]:
        """Return the failures of the ranks of this machine that `ended` so."""
        return failures_of(ended, self.logs, self.hang, self.hang_seconds)

    def progressed(self) -> bool:
        """Return whether the run got further than at any failure before."""
        before, self.furthest = self.furthest, max(self.furthest, self.reached())
        return self.furthest > before

    def tell(self, failures: list[Failure], why: str, left: int) -> None:
        """Say why all ranks restart: by failures of ranks of this machine, or else `why`.

        They may do so `left` more times without progress.
        """
        if failures:
            first = first_here(failures)
            self.record(first)
            why = f"rank {first.rank} on {first.node} failed ({first.line})"
        more = f"{left} more times without progress" if left else "no more without progress"
        say(f"warning: all ranks start again, since {why}; they may do so {more}", error=True)


class Agent(LocalElasticAgent):
    """An agent whose count of restarts starts again whenever the run has made progress.

    A run of a month may lose many machines. One that dies at the same step each time may not start
    again without end, wherever it dies. Restarts that failures on other machines cause do not
    count, as long as there is progress. Overrides private methods of torch 2.11 to 2.13.
    """

    def __init__(self, *args: Any, restarting: Restarts, **options: Any) -> None:
        super().__init__(*args, **options)
        self.restarting = restarting
        self.failures: list[Failure] = []
        """Of ranks of this machine, unless they follow from what happened on another one."""
        self.fallouts = FALLOUTS + self._remaining_restarts
        self.signalled: tuple[signal.Signals, float] | None = None
        """The signal that asked this machine of an elastic run to stop, and when it came."""
        if isinstance(meeting := self._worker_group.spec.rdzv_handler, Membership):
            meeting.reached, meeting.note = restarting.reached, restarting.logs.leave_note
            meeting.no_place = self._end_without_place

    def run(self, role: str = DEFAULT_ROLE) -> RunResult:
        """Start the ranks, and wait for their end.

        Raises `EndedElsewhere` where the run has ended on other machines, and `Left` where it goes
        on there.
        """
        meeting = self._worker_group.spec.rdzv_handler
        if isinstance(meeting, Membership) and meeting.elastic:
            for number in stopping():
                signal.signal(number, self._take_signal)
        try:
            result = super().run(role)
        except SignalException as error:
            code, began = self.restarting.logs.exit_code(), time.monotonic()
            if isinstance(meeting, Membership) and meeting.elastic and code is None:
                left = self.restarting.logs.code_of_ranks() == EXIT_LEFT or not meeting.in_run
                meeting.leave()
                if left:
                    raise Left("left", error.sigval) from None
            if isinstance(meeting, Membership) and code is not None:
                self._exit_barrier_timeout = LEAVE_SECONDS  # the others wait for this machine
                self._exit_barrier()
                if time.monotonic() - began < LEAVE_SECONDS:  # all have saved
                    meeting.end(code)
            raise
        if result is None:  # torch's launcher does not expect that
            raise EndedElsewhere(cast(Membership, meeting).ended())
        if isinstance(meeting, Membership) and not result.is_failed():
            meeting.end(self.restarting.logs.exit_code() or 0)
        return result

    def _invoke_run(self, role: str = DEFAULT_ROLE) -> RunResult:
        try:
            return super()._invoke_run(role)
        except (RendezvousError, DistError):
            self._shutdown(signal.SIGKILL)  # those who meet may go on: nothing is published here
            raise

    def _take_signal(self, number: int, frame: object) -> None:
        """Let the ranks end the run after a step, or leave it. A second signal ends them at once.

        While the machines meet, what the run has reached may be in their memory alone. So this one
        first starts its ranks again. A machine that has no part in the run ends, unless the others
        meet at it. Once the ranks have ended, a signal changes nothing.
        """
        meeting, now = cast(Membership, self._worker_group.spec.rdzv_handler), time.monotonic()
        sent = signal.Signals(number)
        if self.signalled is None and meeting.is_needed:
            self.signalled = sent, now
            note = f"{sent.name} {meeting.way_to_leave()}"
            self.restarting.logs.leave_note(process.SIGNAL, note)
        elif self.signalled is None or now - self.signalled[1] > ECHO_SECONDS:
            for rank in self._pcontext.pids().values() if self._pcontext else ():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rank, signal.SIGKILL)
            raise SignalException("ended", sent)

    def _end_if_signalled(self) -> None:
        if self.signalled is not None:
            raise SignalException("ended", self.signalled[0])

    def _end_without_place(self) -> None:
        if not cast(Membership, self._worker_group.spec.rdzv_handler).is_needed:
            self._end_if_signalled()

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result = super()._monitor_workers(worker_group)
        code = self.restarting.logs.code_of_ranks()
        if result.state == WorkerState.SUCCEEDED and code == EXIT_REGROUP:
            cast(Membership, worker_group.spec.rdzv_handler).regroups = True
            return RunResult(state=WorkerState.HEALTHY)
        left = result.state == WorkerState.SUCCEEDED and code == EXIT_LEFT
        # Ranks that start do not catch signals yet.
        ended = {EXIT_INTERRUPTED, *(-number for number in STOPPING)}
        if left or any(each.exitcode in ended for each in result.failures.values()):
            self._end_if_signalled()
        self.failures = self.restarting.failures(result.failures)
        if self.failures:
            self._count_restarts(worker_group.spec)
        return result

    def _count_restarts(self, spec: WorkerSpec) -> None:
        """Find out how often ranks may start again, of which some on this machine have failed."""
        self._note_progress(spec)
        if any(failure.code == EXIT_MISTAKE for failure in self.failures):
            self._remaining_restarts = 0
        meeting = spec.rdzv_handler
        if not isinstance(meeting, Membership):
            return
        others = None
        if all(failure.kind == Kind.FALLOUT for failure in self.failures):
            others = meeting.others_act()
        if others == "close":
            self._remaining_restarts = 0
        elif others == "meet":
            self.failures = []
            self._remaining_restarts += 1
        else:
            self._remaining_restarts = min(self._remaining_restarts, self._left(meeting))
        if not (others or self._remaining_restarts):
            with contextlib.suppress(RendezvousError):
                meeting.set_closed()  # the others end too, before they wait for this machine

    def _left(self, meeting: Membership) -> int:
        """Return how often ranks may start again, on account of all machines."""
        most, step = self._worker_group.spec.max_restarts, self.restarting.furthest
        if not self._remaining_restarts:
            return 0
        try:
            return done_in(WAIT_SECONDS, lambda: meeting.restarts_left(most, step))
        except TimeoutError:
            raise unanswered(WAIT_SECONDS) from None

    def _note_progress(self, spec: WorkerSpec) -> None:
        if self.restarting.progressed():
            self._remaining_restarts = spec.max_restarts
            self.fallouts = FALLOUTS + spec.max_restarts

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        meeting = worker_group.spec.rdzv_handler
        try:
            super()._rendezvous(worker_group)
        except (KeyError, TypeError, ValueError) as error:  # what the machines tell each other
            raise RendezvousStateError(f"it cannot be read: {error}") from None
        except DistStoreError:  # one machine does not tell: it was lost as the others met it
            if not (isinstance(meeting, Membership) and meeting.num_nodes_waiting()):
                raise
            self._rendezvous(worker_group)
        self.restarting.logs.round = meeting.round if isinstance(meeting, Membership) else ""

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        meeting, why = worker_group.spec.rdzv_handler, ""
        left = self._remaining_restarts
        if not self.failures and isinstance(meeting, Membership):
            if meeting.leaver() and not meeting.regroups:  # ranks here end after the same step
                assert self._pcontext is not None
                self._pcontext.wait(LEAVE_SECONDS, period=0.1)
                meeting.regroups = self.restarting.logs.code_of_ranks() == EXIT_REGROUP
            why = meeting.change()
            self._note_progress(worker_group.spec)
            if meeting.regroups:
                say(*labelled("machines", f"{why}: all ranks start again"))
                return super()._restart_workers(worker_group)
            self.fallouts -= 1
            left = self.fallouts
            if self.fallouts < 0:
                meeting.set_closed()
                raise RendezvousClosedError(f"{why}, again and again without progress")
        self.restarting.tell(self.failures, why, left)
        # They would save, and wait for ranks that may be lost. What they have saved is whole.
        self._shutdown(signal.SIGKILL)
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
