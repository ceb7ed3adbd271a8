"""The launcher of a machine: it meets the others, starts ranks, waits for their end, and decides.

A rank that knows how the run ends leaves its code in a file (`EXIT_CODE_FILE`) and ends with 0: any
other code is a failure.
"""

import contextlib
import math
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Container
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.elastic import rendezvous as elastic
from torch.distributed.elastic.multiprocessing import PContext, SignalException, start_processes

from torchmars.cluster import process
from torchmars.cluster.document import ENDED, Document
from torchmars.cluster.failures import Failure, RankLogs, failure_of
from torchmars.cluster.rendezvous import Machines
from torchmars.cluster.scheduler import in_batch_job
from torchmars.core.console import labelled, say
from torchmars.core.errors import (
    EXIT_CODE_FILE,
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
WAIT_SECONDS = 35.0  # for what other machines do, where ranks here have only lost connections
FALLOUTS = 3  # ends of a round that others cause, in a row without progress, beside restarts


@dataclass
class RankLauncher:
    """The launcher of this machine: it starts a `command` on some `ranks`.

    Users know the place where the machines meet as `rendezvous`. `hang` is the folder of the
    watchdogs. `record` takes the last step and the first failure, on the machine that had it.
    """

    command: list[str]
    ranks: int
    meeting: Machines
    rendezvous: str
    logs: RankLogs
    hang: Path
    max_restarts: int
    last_step: Callable[[], int]
    record: Callable[[int, Failure], None]

    def __post_init__(self) -> None:
        self.meeting.reached, self.meeting.heed = self.reached, self._heed
        self.elastic = self.meeting.sizes.asked.elastic
        self.context: PContext | None = None
        scratch = self.logs.scratch
        self.exit_code_file, self.asked_file = scratch / "exit-code", scratch / "asked"
        self.store_file, self.asked, self.starts, self.first_rank = scratch / "store", "", 0, 0
        # Signals that have come, and when; the first that asked this machine to stop.
        self.noted: list[tuple[int, float]] = []
        self.signalled: signal.Signals | None = None
        self.signalled_at = 0.0
        # The step at the last end of a round that others caused, and how many may follow.
        self.furthest, self.fallouts = 0, FALLOUTS + self.max_restarts
        self.last_reached = 0

    def run(self) -> int:
        """Return the exit code of this machine."""
        meeting = self.meeting
        # Raised wherever one comes, it would leave ranks behind that torch is about to name.
        for number in (*process.stopping(), signal.SIGQUIT):
            signal.signal(number, lambda number, _: self.noted.append((number, time.monotonic())))
        try:
            while (code := self.one_round()) is None:
                pass
            return code
        except elastic.RendezvousClosedError:
            return self._say_end()
        except elastic.RendezvousError as error:
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
            name = type(error).__name__
            say_error(f"the launcher on {process.node()} failed: {name}: {error}")
            return 1
        finally:
            meeting.heed = lambda: None  # it ends within seconds
            self._kill()
            with contextlib.suppress(Exception):  # what the thread has met was told
                meeting.leave()
            self.logs.close()

    def reached(self) -> int:
        """Return the last step that the run has reported, as far as this machine can read it."""
        with contextlib.suppress(UserError):  # a shared folder may fail for a moment
            self.last_reached = self.last_step()
        return self.last_reached

    def one_round(self) -> int | None:
        """Meet, start ranks, wait for their end. Return the run's exit code, if it has ended."""
        meeting = self.meeting
        self._start(meeting.meet())
        while not (over := self._over()):
            if meeting.is_over():
                return self._start_again()
            self._ask_ranks()
            time.sleep(LOOK_SECONDS)
        failures = self._failures(over) if any(over.values()) else []
        text = self._left_code()
        code = int(text or 0)
        if failures and not (text and all(each.is_fallout for each in failures)):
            return self._failed(failures)
        if code == EXIT_MISTAKE:  # the first rank has said it
            meeting.change_round(lambda doc: doc.close(code, ENDED))
            return code
        if code == EXIT_REGROUP:
            left = meeting.done(None) and self.signalled
            return self._say_left(left) if left else self._start_again(planned=True)
        if not meeting.done(code):
            return self._start_again()
        if code == EXIT_STOPPED and self.signalled and self.first_rank:
            say_stopped(f"by {self.signalled.name}: the console of rank 0 says at which step")
        return code

    def _left_code(self) -> str:
        """Return the exit code that a rank here has left, or ""."""
        return self.exit_code_file.read_text() if self.exit_code_file.exists() else ""

    def _start(self, doc: Document) -> None:
        """Start the ranks of this machine."""
        for file in (self.exit_code_file, self.asked_file, self.store_file):
            file.unlink(missing_ok=True)
        machines, meeting = len(doc.members), self.meeting
        number, size = doc.members.index(meeting.me), machines * self.ranks
        _, address, port = doc.machines[doc.members[0]]
        several = meeting.sizes.asked.most > 1
        common = {
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(size),
            "ROLE_WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(self.ranks),
            "GROUP_RANK": str(number),
            "GROUP_WORLD_SIZE": str(machines),
            "TORCHELASTIC_RUN_ID": meeting.run_id,
            "TORCHELASTIC_RESTART_COUNT": str(self.starts),
            EXIT_CODE_FILE: str(self.exit_code_file),
            process.LAUNCHER: str(os.getpid()),
            process.ASKED: str(self.asked_file),
            process.ROUND: f"{doc.meeting}:{doc.round}" if several else "",
            process.STORE_FILE: "" if machines > 1 else str(self.store_file),
        }
        self.first_rank, envs = number * self.ranks, {}
        for local in range(self.ranks):
            rank = str(self.first_rank + local)
            envs[local] = common | {"LOCAL_RANK": str(local), "RANK": rank, "ROLE_RANK": rank}
        args = {local: tuple(self.command[1:]) for local in envs}
        self.starts, self.asked = self.starts + 1, ""
        # torch sets handlers of its own as it starts: for no signal but one that none sends here.
        os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGUSR2"
        self.context = start_processes("rank", self.command[0], args, envs, self.logs)

    def _over(self) -> dict[int, int]:
        """Return the exit codes of ranks here once all have ended, or soon after one has failed."""
        assert self.context is not None
        deadline = math.inf
        while True:
            over = {}
            for local, pid in self.context.pids().items():
                found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                if found is not None:
                    exited = found.si_code == os.CLD_EXITED
                    over[local] = found.si_status if exited else -found.si_status
            if len(over) == self.ranks or time.monotonic() > deadline:
                return over
            if not any(over.values()):
                return {}
            deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
            time.sleep(0.02)

    def _failures(self, ended: Container[int]) -> list[Failure]:
        """Return the failures of the ranks here that have `ended`, and end those that run."""
        assert self.context is not None
        self.context.close(signal.SIGKILL)
        result = self.context.wait(0)  # torch reads the files of @record
        assert result is not None
        self.logs.close()
        return [
            failure_of(self.first_rank + local, failure, self.logs.last[local], self.hang)
            for local, failure in result.failures.items()
            if local in ended
        ]

    def _failed(self, failures: list[Failure]) -> int | None:
        """Return the run's exit code, since ranks here have failed; None: they start again."""
        meeting, doc = self.meeting, self.meeting.look()
        first = min(failures, key=lambda each: (each.is_fallout, each.time, each.rank))
        uncaught = {EXIT_INTERRUPTED, *(-each for each in process.STOPPING)}
        if self.signalled and first.code in uncaught:  # ranks that start
            raise SignalException("ended", self.signalled)
        if first.is_fallout and "address already in use" in first.message.lower():
            taken = f"a port of {process.node()} was taken"  # the next round has another
            meeting.change_round(lambda doc: doc.end_round(taken))
            return self._start_again()
        deadline, several = time.monotonic() + WAIT_SECONDS, len(doc.members) > 1
        while first.is_fallout and several and time.monotonic() < deadline:
            if meeting.is_over():  # what the others do tells more
                return self._start_again()
            time.sleep(LOOK_SECONDS)
        self.record(step := self.reached(), first)
        code = first.code if first.code >= 0 else 128 - first.code
        most = -1 if code == EXIT_MISTAKE else self.max_restarts
        said = first.in_words(self.logs)
        if code == EXIT_MISTAKE and not first.rank % self.ranks and first.line.endswith(" code 2"):
            said = ENDED  # the rank has said it
        doc = meeting.change_round(lambda doc: doc.fail(step, most, code, said))
        return self._say_end() if doc.closed else self._start_again()

    def _start_again(self, planned: bool = False) -> int | None:
        """Say why this round has ended, and end the ranks here: they might wait for others."""
        self._kill()
        meeting = self.meeting
        if meeting.is_closed():
            raise elastic.RendezvousClosedError
        why, doc = meeting.change_in_words(), meeting.document
        failed = doc.failed_in == meeting.round
        if planned and not failed:
            say(*labelled("machines", f"{why}: all ranks start again"))
            return None
        before, self.furthest = self.furthest, max(self.furthest, self.reached())
        if self.furthest > before:
            self.fallouts = FALLOUTS + self.max_restarts
        self.fallouts -= not failed
        left = self.max_restarts - doc.failures if failed else self.fallouts
        if left < 0:
            raise elastic.RendezvousError(f"{why}, again and again without progress")
        times = f"{counted(left, 'more time') if left else 'no more'} without progress"
        say(f"warning: all ranks start again, since {why}; they may do so {times}", error=True)
        return None

    def _ask_ranks(self) -> None:
        """Pass on to the ranks how they are to end after a step, since machines leave or come."""
        leaves = self.signalled.name if self.elastic and self.signalled else ""
        if (asked := self.meeting.asked(leaves)) != self.asked:
            with contextlib.suppress(OSError):  # if the disk refuses it, they go on
                self.asked_file.write_text(asked)
                self.asked = asked

    def _heed(self) -> None:
        """Let the ranks save and end where a signal has come. A second one ends them at once.

        A machine of an elastic run leaves it after a step: while machines meet, what the run has
        reached may be in their memory alone, so this one first starts its ranks again. One that has
        no part in the run ends, unless the others meet at it.
        """
        meeting = self.meeting
        in_run = meeting.round >= 0 if self.elastic else self.context is not None
        needed = meeting.holds_store if meeting.spare else in_run
        while self.noted:
            number, at = self.noted.pop(0)
            sent = signal.Signals(number)
            second = self.signalled and at > self.signalled_at + process.ECHO_SECONDS
            if sent == signal.SIGQUIT or second:
                raise SignalException("ended", sent)
            if not self.signalled:
                self.signalled, self.signalled_at = sent, at
                ranks = self.context.pids() if self.context and not self.elastic else {}
                for pid in ranks.values():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, number)
        if self.signalled and not needed:
            raise SignalException("ended", self.signalled)

    def _kill(self) -> None:
        """End the ranks here that still run."""
        if self.context is not None:
            self.context.close(signal.SIGKILL)
            self.context = None

    def _say_left(self, by: signal.Signals) -> int:
        """Print that the run goes on without this machine. Return the exit code."""
        say_stopped(f"by {by.name}: {process.node()} has left the run to the other machines")
        return EXIT_STOPPED

    def _say_end(self) -> int:
        """Print how the run has ended, unless a rank has said it. Return the exit code."""
        code, how = self.meeting.ending()
        if self.meeting.spare:
            say(*labelled("spare", f"{process.node()} had no place in the run, which has ended"))
        elif how != ENDED or code is None:
            say_error(how)
        return EXIT_UNCONNECTED if code is None else code

    def _say_lost(self, error: elastic.RendezvousError) -> int:
        """Print that this machine has not met the others, or lost them. Return the exit code."""
        node, place = process.node(), self.rendezvous
        text, left = str(error).partition("\n")[0], self._left_code()
        if self.starts and left in ("0", str(EXIT_STOPPED)):  # who says so may be gone
            if left != "0":
                say_stopped(f"and saved: {node} has lost the other machines ({text})")
            return int(left)
        if isinstance(error, elastic.RendezvousStateError):
            say_error(
                f"what lies at the rendezvous {place} is from no machine of this run ({text}): "
                "give all machines the same RDZV_TOKEN, and see who else reaches that port"
            )
        elif self.starts:
            say_error(f"{node} has lost the other machines: {text}")
        else:
            say_error(
                f"the {self.meeting.sizes.asked} machines did not meet at {place} ({text}): start "
                "the same command on the others, raise RDZV_TIMEOUT or set another NNODES, and see "
                "that nothing else listens on that port"
            )
            return EXIT_UNCONNECTED if self.elastic or in_batch_job(os.environ) else EXIT_MISTAKE
        return EXIT_UNCONNECTED


def say_stopped(how: str) -> None:
    """Print that the run is not complete, where no rank may have said so."""
    say(*labelled("stopped", f"{how}; the same command resumes"))
