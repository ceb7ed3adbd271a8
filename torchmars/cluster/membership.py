"""The machines of a run: torch's rendezvous, which also notices that one of them is lost.

torch alone never notices a machine that falls silent while its ranks are waited for
(pytorch#111646), and judges the beats of machines by each other's clocks.
"""

import contextlib
import math
import re
import secrets
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Literal

from torch.distributed import Store
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousBackend,
    RendezvousSettings,
    RendezvousTimeout,
    _BackendRendezvousStateHolder,  # torch 2.11 to 2.13 have both
    _NodeDesc,
    create_handler,
)

from torchmars.cluster import process
from torchmars.cluster.environment import beat_seconds, lost_seconds
from torchmars.cluster.failures import WAIT_SECONDS
from torchmars.cluster.rounds import NOT_BY_TORCH, Rounds
from torchmars.core.console import harmless
from torchmars.core.errors import UserError
from torchmars.core.timers import done_in

LOOK_SECONDS = 2.0  # of a pause between looks at the beats that count: this machine may stand still
ANCIENT = datetime.min.replace(tzinfo=UTC)
PATIENT_SECONDS = 600.0  # that ranks which end after a step, and their trackers, may take
END_SECONDS = 5.0  # that the store may take to tell or to hear how a run has ended
# How the others go on if a machine leaves: from copies in memory; from a checkpoint, where parts of
# the copies would be gone; or not at all.
WayToLeave = Literal["copy", "save", "stop"]
NEVER = 3e8  # seconds that torch lets a machine be silent, by whatever clocks: ten years


class Beats(_BackendRendezvousStateHolder):
    """The state of the machines, from which one is dropped once it has been silent for too long.

    A beat is a new value, whatever time it names. So the clocks of the machines need not agree.
    """

    def __init__(
        self,
        backend: RendezvousBackend,
        settings: RendezvousSettings,
        own: _NodeDesc,
        seconds: float,
    ) -> None:
        super().__init__(backend, settings)
        self.own, self.seconds = own, seconds
        self.looked, self.last_look = 0.0, time.monotonic()
        self.seen: dict[_NodeDesc, tuple[datetime, float]] = {}
        """The newest beat of each machine, and how long this one had looked by then."""
        self.silent: set[_NodeDesc] = set()
        """The machines that this one has dropped."""

    def _sanitize(self) -> None:
        now = time.monotonic()
        self.looked += min(now - self.last_look, LOOK_SECONDS)
        self.last_look = now
        beats = self._state.last_heartbeats
        for node, beat in beats.items():
            if node not in self.seen or self.seen[node][0] != beat:
                self.seen[node] = beat, self.looked
                self.silent.discard(node)
            elif self.looked - self.seen[node][1] > self.seconds:
                beats[node] = ANCIENT
                self.silent.add(node)
        present = datetime.now(UTC)
        if self.own in beats and beats[self.own] > present:  # the clock was set back
            beats[self.own] = present - self._settings.keep_alive_interval
        super()._sanitize()


class Membership(DynamicRendezvousHandler):
    """The rendezvous of several machines. Overrides private methods of torch 2.11 to 2.13."""

    _state_holder: Beats
    _op_executor: Rounds
    elastic: bool
    """Whether machines come and go."""
    holds_store: bool
    """Whether the others may meet at this machine, or one that starts beside it."""
    join_seconds: int
    """How long after a change of the machines those that come have to wait."""
    reached: Callable[[], int]
    """Returns the last step that the run has reported."""
    note: Callable[[str], None]
    """Leaves a note of that name for the ranks of this machine."""
    no_place: Callable[[], None]
    """Called when others begin to go on without this machine."""
    begun, begun_at = 0.0, 0
    """When the newest round began, by this machine's own clock, and the step reached by then."""
    asked = False
    """Whether the ranks here have been asked to end, since machines join."""
    regroups = False
    """Whether the ranks here have ended after a step, to start again with other machines."""
    members: frozenset[_NodeDesc] = frozenset()
    """The machines of the newest round that this one has been in."""
    round = ""
    """That round: the name of the meeting, and a number that grows."""

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for the machines of the next round; name those of the last one that do not come."""
        self._store.set(self._key(f"machine/{self._this_node}"), process.node())
        self._op_executor.patient_until = time.monotonic() + PATIENT_SECONDS * self.regroups
        try:
            info = super().next_rendezvous()
        except RendezvousTimeoutError:
            missing = self._names(self.members - {self._this_node} - self._here())
            if not missing:
                raise
            seconds = self.settings.timeout.join.total_seconds()
            raise RendezvousTimeoutError(
                f"{missing} did not come back in {seconds:g} s, nor another machine instead"
            ) from None
        except RendezvousClosedError:
            if self._op_executor.spare:
                raise RendezvousGracefulExitError from None
            raise
        self.members, self.regroups, self.asked = self._here(), False, False
        self.begun, self.begun_at = time.monotonic(), self.reached()
        meeting = self._store.compare_set(self._key("meeting"), "", secrets.token_hex(8)).decode()
        if not re.fullmatch("[0-9a-f]{16}", meeting):
            raise RendezvousStateError("the meeting has no name of ours")
        self.round = f"{meeting}:{self._state_holder.state.round}"
        return info

    def num_nodes_waiting(self) -> int:
        """Return how many machines make this round end; 0 while it goes on.

        They are lost, or have left it. For those that may join, the ranks of all machines end
        first: they are asked to here. Raises `RendezvousClosedError` where the run has ended.
        """
        waiting, here = super().num_nodes_waiting(), len(self._here())
        gone = len(self.members - self._here())
        if gone and self._state_holder.state.closed:
            raise RendezvousClosedError("the run has ended on other machines")
        if (
            not self.asked
            and self._op_executor.largest(here + waiting) > here
            and time.monotonic() >= self.begun + self.join_seconds
            and self.reached() > self.begun_at  # else joins could keep a run from any step
        ):
            self.asked = True
            self.note(process.REGROUP)
        return gone or int(self.regroups)

    @property
    def in_run(self) -> bool:
        """Whether this machine has ranks in the run, or had them and meets the others again."""
        return bool(self.members) and not self._op_executor.spare

    @property
    def is_needed(self) -> bool:
        """Whether the others would lose something if this machine ended at once."""
        return self.in_run or (self._op_executor.spare and self.holds_store)

    def way_to_leave(self) -> WayToLeave:
        """Return how the others go on if this machine leaves the run."""
        state, here = self._state_holder.state, len(self.members)
        coming, largest = len(state.wait_list | state.redundancy_list), self._op_executor.largest
        if self.holds_store or not largest(here - 1 + coming):
            return "stop"
        return "copy" if largest(here - 1) == here - 1 > 0 else "save"

    def leave(self) -> None:
        """Leave the run to the other machines. They would see it by themselves, but later."""

        def leave() -> None:
            self._stop_heartbeats()
            # A signal may have come in the middle of a change: take the state from the store.
            self._state_holder._dirty, self._state_holder._last_sync_time = False, -1
            self._store.set(self._key(f"left/{self.round}"), process.node())
            self._op_executor.run(self._op_executor.leave, time.monotonic() + END_SECONDS)

        with contextlib.suppress(RuntimeError, TimeoutError, RendezvousError):
            done_in(END_SECONDS, leave)

    def change(self) -> str:
        """Return why the machines meet again, in words."""
        if self.members and self._this_node not in self._here():
            return "the other machines go on without this one"
        if silent := self._names(self.members & self._state_holder.silent):
            return f"{silent} fell silent"
        if new := self._names(frozenset(self._state_holder.state.wait_list) - self.members):
            return f"{new} joins"
        deadline = time.monotonic() + END_SECONDS
        while not (leaver := self.leaver()) and self.regroups and time.monotonic() < deadline:
            time.sleep(0.1)  # no round can begin before it has left this one
        if leaver or self.regroups:
            return f"{leaver or 'another machine'} leaves"
        return "those of another machine do"

    def leaver(self) -> str:
        """Return the name of the machine that has left this round by a signal, if one has."""
        if not self._store.check([key := self._key(f"left/{self.round}")]):
            return ""
        return harmless(self._store.get(key).decode(errors="replace"))[:100]

    def others_act(self) -> Literal["close", "meet"] | None:
        """Wait for what other machines do after ranks here have lost a connection; None: nothing.

        One whose rank has failed ends its other ranks. Then it closes the rendezvous, or leaves
        this round to meet again. One that is lost is dropped from the round.
        """
        deadline = time.monotonic() + WAIT_SECONDS
        while time.monotonic() < deadline:
            if self.is_closed():
                return "close"
            if self.num_nodes_waiting():
                return "meet"
            time.sleep(0.2)
        return None

    def restarts_left(self, most: int, step: int) -> int:
        """Return how often ranks may start again since the run reported `step`, of `most` times.

        Ranks of this machine have failed of themselves. A round in which those of several machines
        do counts once.
        """
        first = self._store.add(self._key(f"failed in round/{self.round}"), 1) == 1
        failed = self._store.add(self._key(f"failed/{self.launch}/{step}"), int(first))
        return max(0, most + 1 - failed)

    def check_bounds(self, asked: str) -> None:
        """Raise `UserError` where the first machine of this run `asked` for other sizes."""
        key = self._key(f"bounds/{self.launch}")
        first = self._store.compare_set(key, "", asked).decode(errors="replace")
        if first != asked:
            raise UserError(
                f"{process.node()} has {asked}, and the first machine {harmless(first)[:100]}: "
                "give all machines the same"
            )

    def end(self, code: int) -> None:
        """Close the rendezvous; machines that have no place in the run learn its exit code."""

        def close() -> None:
            self._store.set(self._key(f"ended/{self.launch}"), str(code))
            self.set_closed()

        # The store may have ended before.
        with contextlib.suppress(RuntimeError, TimeoutError, RendezvousError):
            done_in(END_SECONDS, close)

    def ended(self) -> int | None:
        """Return the exit code of a run that has ended on other machines; None: they failed."""

        def read() -> str:
            key = self._key(f"ended/{self.launch}")
            return self._store.get(key).decode() if self._store.check([key]) else ""

        with contextlib.suppress(RuntimeError, TimeoutError, ValueError):
            return int(done_in(END_SECONDS, read))
        return None

    @property
    def launch(self) -> int:
        """How often a run was started at this store after another one there had ended."""
        return int(self._store.add(self._key("launches"), 0))

    def _close(self) -> None:
        """Close the rendezvous, unless the others have a round without this machine."""
        self._state_holder.sync()
        if not self._state_holder.state.complete or self._this_node in self._here():
            super()._close()

    def _here(self) -> frozenset[_NodeDesc]:
        return frozenset(self._state_holder.state.participants)

    def _names(self, nodes: frozenset[_NodeDesc]) -> str:
        return ", ".join(sorted({*map(self._name, nodes)}))

    def _key(self, name: str) -> str:
        return f"{self.settings.run_id}/{name}"

    def _name(self, node: _NodeDesc) -> str:
        with contextlib.suppress(RuntimeError):  # the store's
            if self._store.check([key := self._key(f"machine/{node}")]):
                name = self._store.get(key).decode(errors="replace")
                return harmless(" ".join(name.split()))[:100]
        return node.addr


def unanswered(seconds: float) -> RendezvousConnectionError:
    """Return the error of a machine that the store has not answered for some seconds."""
    return RendezvousConnectionError(f"their store has not answered for {seconds:g} s")


def meet(store: Store, backend: RendezvousBackend, parameters: RendezvousParameters) -> Membership:
    """Return the rendezvous of several machines at `store`, whose state `backend` keeps.

    Raises `UserError` where this machine of an elastic run would have other sizes than others.
    """
    made = create_handler(store, backend, parameters)
    machines = parameters.max_nodes
    usable = [int(each) for each in parameters.get("usable", f"{machines}").split("/")]
    beat, timeout = beat_seconds(machines), made.settings.timeout
    settings = replace(
        made.settings,
        min_nodes=usable[0],
        max_nodes=usable[-1],
        timeout=RendezvousTimeout(timeout.join, NOT_BY_TORCH, timeout.close, timeout.heartbeat),
        keep_alive_interval=timedelta(seconds=beat),
        keep_alive_max_attempt=int(NEVER / beat),
    )
    seconds = parameters.get_as_int("lost_seconds", lost_seconds(machines)) or math.inf
    holder = Beats(backend, settings, made._this_node, seconds)
    meeting = Membership(made._this_node, settings, backend.name, store, holder)
    meeting._op_executor = Rounds(made._this_node, holder, settings)
    meeting._op_executor.usable = usable
    # Until there is an agent:
    meeting.reached, meeting.note, meeting.no_place = lambda: 0, lambda name: None, lambda: None
    meeting._op_executor.no_place = lambda: meeting.no_place()
    meeting.join_seconds = int(parameters.get("join_seconds", 60))
    meeting.elastic = (fewest := parameters.min_nodes) < machines
    meeting.holds_store = parameters.get_as_bool("is_host") is not False
    if meeting.elastic:
        ranks = parameters.get("per_machine")
        meeting.check_bounds(f"NNODES = {fewest}:{machines} and NGPU = {ranks}")
    return meeting
