"""The launcher of a machine: it meets the others, starts ranks, waits for their end, and decides.

A rank that knows how the run ends leaves its code in a file (`EXIT_CODE_FILE`) and ends with 0: any
other code is a failure.
"""

import contextlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.elastic.multiprocessing import PContext, SignalException, start_processes
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousInfo,
    RendezvousStateError,
)

from torchmars.cluster import process
from torchmars.cluster.document import ENDED
from torchmars.cluster.failures import Failure, RankLogs, failure_of, first_of
from torchmars.cluster.rendezvous import Machines
from torchmars.core.console import labelled, say
from torchmars.core.errors import (
    EXIT_CODE_FILE,
    EXIT_HUNG,
    EXIT_INTERRUPTED,
    EXIT_MISTAKE,
    EXIT_REGROUP,
    EXIT_STOPPED,
    EXIT_UNCONNECTED,
    UserError,
    say_error,
)
from torchmars.core.words import counted

LOOK_SECONDS = 0.1
GRACE_SECONDS = 2.0  # for other ranks here to fail too, once one has
# How long to wait for what other machines do, where ranks here have only lost connections.
WAIT_SECONDS = 35.0
HANG_SECONDS = 5.0  # for ranks elsewhere to leave their stacks too
FALLOUTS = 3  # ends of a round that others cause, in a row without progress, beside restarts


@dataclass
class Job:
    """What a launcher starts: a command on some ranks, for a run.

    The machines meet at `rendezvous`, as users know it. `hang` is the folder of the watchdogs.
    `reached` returns the last step that the run has reported, and `record` is called with it and
    the first failure, on the machine that had it.
    """

    command: list[str]
    ranks: int
    rendezvous: str
    logs: RankLogs
    hang: Path
    max_restarts: int
    reached: Callable[[], int]
    record: Callable[[int, Failure], None]


class RankLauncher:
    """The launcher of this machine."""

    def __init__(self, job: Job, meeting: Machines) -> None:
        self.job, self.meeting, self.logs = job, meeting, job.logs
        meeting.reached, meeting.heed = self.reached, self._heed
        self.elastic = meeting.sizes.asked.elastic
        self.context: PContext | None = None
        scratch = job.logs.scratch
        self.exit_code_file, self.asked_file = scratch / "exit-code", scratch / "asked"
        self.asked, self.starts, self.first_rank = "", 0, 0
        # Signals that have come, and when; the first that asked this machine to stop.
        self.noted: list[tuple[int, float]] = []
        self.signalled: signal.Signals | None = None
        self.signalled_at = 0.0
        # The step at the last end of a round that others caused, and how many may follow.
        self.furthest, self.fallouts = 0, FALLOUTS + job.max_restarts
        self.last_reached = 0

    def run(self) -> int:
        """Return the exit code of this machine."""
        meeting, node = self.meeting, process.node()
        # Raised wherever one comes, it would leave ranks behind that torch is about to name.
        for number in (*process.stopping(), signal.SIGQUIT):
            signal.signal(number, lambda number, _: self.noted.append((number, time.monotonic())))
        try:
            while (code := self.one_round()) is None:
                pass
            return code
        except RendezvousClosedError as error:
            return self._say_end(str(error))
        except RendezvousError as error:
            return self._say_lost(error)
        except SignalException as error:
            if self.elastic and (meeting.spare or meeting.round < 0):
                return self._say_left(error.sigval)
            say_stopped(f"by {error.sigval.name} before it could save")
            return 128 + error.sigval
        except Exception as error:  # an error of this launcher: the others go on
            if isinstance(error, UserError) and not self.starts:
                raise
            traceback.print_exc(file=sys.__stderr__)
            say_error(f"the launcher on {node} failed: {type(error).__name__}: {error}")
            return 1
        finally:
            meeting.heed = lambda: None  # it ends within seconds
            self._kill()
            with contextlib.suppress(Exception):  # what the thread has met was told
                meeting.shutdown()
            self.logs.close()

    def reached(self) -> int:
        """Return the last step that the run has reported, as far as this machine can read it."""
        with contextlib.suppress(UserError):  # a shared folder may fail for a moment
            self.last_reached = self.job.reached()
        return self.last_reached

    def one_round(self) -> int | None:
        """Meet, start ranks, wait for their end. Return the run's exit code, if it has ended."""
        meeting = self.meeting
        self._start(meeting.next_rendezvous())
        while not (over := self._over()):
            if meeting.num_nodes_waiting():
                return self._tell_of_others()
            self._ask_ranks()
            time.sleep(LOOK_SECONDS)
        failures = self._failures() if any(over.values()) else []
        text = self._left_code()
        code = int(text or 0)
        if failures and not (text and all(each.is_fallout for each in failures)):
            return self._failed(failures)
        if code == EXIT_MISTAKE:  # the first rank has said it
            meeting.close(code, ENDED)
            return code
        if code != EXIT_REGROUP:
            if not meeting.done(code):
                return self._tell_of_others()
            if code == EXIT_STOPPED and self.signalled and self.first_rank:
                say_stopped(f"by {self.signalled.name}: the console of rank 0 says at which step")
            return code
        if meeting.done(None) and self.signalled:
            return self._say_left(self.signalled)
        return self._tell_of_others(planned=True)

    def _left_code(self) -> str:
        """Return the exit code that a rank here has left, or ""."""
        return self.exit_code_file.read_text() if self.exit_code_file.exists() else ""

    def _start(self, info: RendezvousInfo) -> None:
        """Start the ranks of this machine."""
        for file in (self.exit_code_file, self.asked_file, self.logs.scratch / "store"):
            file.unlink(missing_ok=True)
        job, meeting, doc = self.job, self.meeting, self.meeting.document
        store, size = info.bootstrap_store_info, info.world_size * job.ranks
        assert doc is not None and store is not None
        common = {
            "MASTER_ADDR": store.master_addr,
            "MASTER_PORT": str(store.master_port),
            "WORLD_SIZE": str(size),
            "ROLE_WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(job.ranks),
            "GROUP_RANK": str(info.rank),
            "GROUP_WORLD_SIZE": str(info.world_size),
            "TORCHELASTIC_RUN_ID": meeting.get_run_id(),
            "TORCHELASTIC_RESTART_COUNT": str(self.starts),
            EXIT_CODE_FILE: str(self.exit_code_file),
            process.LAUNCHER: str(os.getpid()),
            process.ASKED: str(self.asked_file),
            process.ROUND: f"{doc.meeting}:{doc.round}" if meeting.several else "",
            process.STORE_FILE: "" if info.world_size > 1 else str(self.logs.scratch / "store"),
        }
        self.first_rank, envs = info.rank * job.ranks, {}
        for local in range(job.ranks):
            rank = str(self.first_rank + local)
            envs[local] = common | {"LOCAL_RANK": str(local), "RANK": rank, "ROLE_RANK": rank}
        args = {local: tuple(job.command[1:]) for local in envs}
        self.starts, self.asked = self.starts + 1, ""
        # torch sets handlers of its own as it starts: for no signal but one that none sends here.
        os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGUSR2"
        self.context = start_processes("rank", job.command[0], args, envs, self.logs)

    def _over(self) -> dict[int, int]:
        """Return the exit codes of ranks here once all have ended, or one has failed.

        If one has, the others have a moment to end too, and are then ended.
        """
        assert self.context is not None
        deadline = None
        while True:
            over = {}
            for local, pid in self.context.pids().items():
                found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                if found is not None:
                    exited = found.si_code == os.CLD_EXITED
                    over[local] = found.si_status if exited else -found.si_status
            if len(over) == self.job.ranks:
                return over
            if not any(over.values()):
                return {}
            deadline = deadline or time.monotonic() + GRACE_SECONDS
            if time.monotonic() > deadline:
                return over
            time.sleep(0.02)

    def _failures(self) -> list[Failure]:
        """Return the failures of ranks here, and end those that still run."""
        assert self.context is not None
        ended = self._over()
        self.context.close(signal.SIGKILL)
        result = self.context.wait(0)  # torch reads the files of @record
        assert result is not None
        self.logs.close()
        return [
            failure_of(self.first_rank + local, failure, self.logs.last[local], self.job.hang)
            for local, failure in result.failures.items()
            if local in ended
        ]

    def _failed(self, failures: list[Failure]) -> int | None:
        """Return the run's exit code, since ranks here have failed; None: they start again."""
        meeting, first, job = self.meeting, first_of(failures), self.job
        doc = meeting.look()
        uncaught = {EXIT_INTERRUPTED, *(-each for each in process.STOPPING)}
        if self.signalled and first.code in uncaught:  # ranks that start
            raise SignalException("ended", self.signalled)
        deadline = time.monotonic() + WAIT_SECONDS
        alone = doc is None or len(doc.members) < 2
        taken = "address already in use" in first.message.lower()
        while first.is_fallout and not (alone or taken) and time.monotonic() < deadline:
            if meeting.num_nodes_waiting():  # what the others do tells more
                return self._tell_of_others()
            time.sleep(LOOK_SECONDS)
        if taken and first.is_fallout:  # the ranks' store has another port in the next round
            meeting.end_round(f"a port of {process.node()} was taken")
            return self._tell_of_others()
        if first.code == EXIT_HUNG:
            time.sleep(HANG_SECONDS)
        job.record(self.reached(), first)
        code = first.code if first.code >= 0 else 128 - first.code
        most = -1 if code == EXIT_MISTAKE else job.max_restarts
        said = first.in_words(self.logs)
        if code == EXIT_MISTAKE and not first.rank % job.ranks and first.line.endswith(" code 2"):
            said = ENDED  # the rank has said it
        again = meeting.fail(most, code, said)
        return self._tell_of_others() if again else self._say_end(said)

    def _tell_of_others(self, planned: bool = False) -> int | None:
        """Say why this round has ended, and end the ranks here: they might wait for others."""
        self._kill()
        meeting = self.meeting
        if meeting.is_closed():
            raise RendezvousClosedError(meeting.ending())
        why, doc = meeting.change_in_words(), meeting.document
        assert doc is not None
        if planned and doc.failed_in != meeting.round:
            say(*labelled("machines", f"{why}: all ranks start again"))
            return None
        reached, self.furthest = self.furthest, max(self.furthest, self.reached())
        if doc.failed_in == meeting.round:
            left = self.job.max_restarts - doc.failures
        else:
            more = FALLOUTS + self.job.max_restarts if self.furthest > reached else self.fallouts
            self.fallouts = left = more - 1
        if left < 0:
            meeting.close(EXIT_UNCONNECTED, f"{why}, again and again without progress")
            raise RendezvousClosedError(meeting.ending())
        times = f"{counted(left, 'more time') if left else 'no more'} without progress"
        say(f"warning: all ranks start again, since {why}; they may do so {times}", error=True)
        return None

    def _ask_ranks(self) -> None:
        """Pass on to the ranks how they are to end after a step, since machines leave or come."""
        if self.elastic and self.signalled:
            self.meeting.leave_after_step(self.signalled.name)
        if (asked := self.meeting.asked()) != self.asked:
            with contextlib.suppress(OSError):  # if the disk refuses it, they go on
                self.asked_file.with_suffix(".new").write_text(asked)
                self.asked_file.with_suffix(".new").rename(self.asked_file)
                self.asked = asked

    def _heed(self) -> None:
        """Let the ranks save and end where a signal has come. A second one ends them at once.

        It is called wherever this machine waits. A machine of an elastic run leaves it after a
        step. While such machines meet, what the run has reached may be in their memory alone, so
        this one first starts its ranks again. One that has no part in the run ends, unless the
        others meet at it.
        """
        meeting = self.meeting
        in_run = meeting.round >= 0 if self.elastic else self.context is not None
        needed = meeting.holds_store if meeting.spare else in_run
        while self.noted:
            number, at = self.noted.pop(0)
            sent = signal.Signals(number)
            second = self.signalled and at > self.signalled_at + process.ECHO_SECONDS
            if sent == signal.SIGQUIT or second or not needed:
                self._send(signal.SIGKILL)
                raise SignalException("ended", sent)
            if not self.signalled:
                self.signalled, self.signalled_at = sent, at
                if not self.elastic:
                    self._send(sent)
        if self.signalled and not needed:
            raise SignalException("ended", self.signalled)

    def _send(self, number: int) -> None:
        for pid in self.context.pids().values() if self.context else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _kill(self) -> None:
        """End the ranks here that still run."""
        if self.context is not None:
            self.context.close(signal.SIGKILL)
            self.context = None

    def _say_left(self, by: signal.Signals) -> int:
        """Print that the run goes on without this machine. Return the exit code."""
        say_stopped(f"by {by.name}: {process.node()} has left the run to the other machines")
        return EXIT_STOPPED

    def _say_end(self, how: str) -> int:
        """Print how the run has ended, unless a rank has said it. Return the exit code."""
        code = self.meeting.exit_code()
        if self.meeting.spare:
            how = f"the run has ended on other machines: {process.node()} had no place in it"
        if self.meeting.spare and code is not None:
            say(*labelled("spare", how))
        elif how != ENDED or code is None:
            say_error(how)
        return EXIT_UNCONNECTED if code is None else code

    def _say_lost(self, error: RendezvousError) -> int:
        """Print that this machine has not met the others, or lost them. Return the exit code."""
        node, place = process.node(), self.job.rendezvous
        text = (str(error) or type(error).__name__).splitlines()[0]
        if isinstance(error, RendezvousStateError):
            say_error(
                f"what lies at the rendezvous {place} is from no machine of this run ({text}): "
                "give all machines the same RDZV_TOKEN, and see who else reaches that port"
            )
            return EXIT_UNCONNECTED
        if not self.starts:
            sizes = self.meeting.sizes.asked
            say_error(
                f"the {sizes} machines did not meet at {place} ({text}): start the same command on "
                "the others, raise RDZV_TIMEOUT or set another NNODES, and see that nothing else "
                "listens on that port"
            )
            return EXIT_UNCONNECTED if process.may_meet_later() else EXIT_MISTAKE
        left = self._left_code()
        if left in ("0", str(EXIT_STOPPED)):  # the machine whose ranks say so may be gone
            if left != "0":
                say_stopped(f"and saved: {node} has lost the other machines ({text})")
            return int(left)
        say_error(f"{node} has lost the other machines: {text}")
        return EXIT_UNCONNECTED


def say_stopped(how: str) -> None:
    """Print that the run is not complete, where no rank may have said so."""
    say(*labelled("stopped", f"{how}; the same command resumes"))
