"""How the machines of an elastic run come together: when a round is formed, and of whom.

torch compares times that clocks of different machines tell, and starts all that are there.
"""

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial

from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    _Action,  # torch 2.11 to 2.13 have all of these
    _DistributedRendezvousOpExecutor,
    _RendezvousContext,
    _RendezvousJoinOp,
)

from torchmars.core.console import labelled, say

# How long the machines of a round wait for more of them to come back. torch looks once a second.
REGROUP_SECONDS = 3.0
MARGIN_SECONDS = 2.0  # before a machine's time to join is over, it can still form a round
NOT_BY_TORCH = timedelta(days=10_000)  # until torch itself forms a round of fewer than all


class Rounds(_DistributedRendezvousOpExecutor):
    """Forms rounds of a usable number of machines. Overrides private methods of torch 2.11 to 2.13.

    The first round waits for all machines that a run may have, as long as a machine may wait. The
    others wait for `REGROUP_SECONDS`. Machines that are too many stay in the list of those that
    wait; who was in the last round is the last to do so, since it has copies of the run.
    """

    usable: Sequence[int]
    """The numbers of machines with which the run goes."""
    last = -2
    """The newest round that this machine has been in. The first of all has the number 0."""
    spare = False
    """Whether others go on without this machine, which waits."""
    patient_until = 0.0
    """For how long those are waited for whose ranks end after the same step, by this clock."""
    no_place: Callable[[], None]
    """Called when others begin to go on without this machine."""
    enough_since: float | None = None
    """Since when there have been enough machines for a round, by this machine's own clock."""

    def run(
        self,
        state_handler: Callable[[_RendezvousContext, float], _Action],
        deadline: float,
        update_deadline: Callable[[timedelta], float] | None = None,
    ) -> None:
        """See base class."""
        if isinstance(state_handler, _RendezvousJoinOp):
            self.enough_since, self.deadline = None, deadline
            state_handler = partial(self._join, state_handler)
        super().run(state_handler, deadline, update_deadline)

    def _join(
        self, torchs: _RendezvousJoinOp, context: _RendezvousContext, deadline: float
    ) -> _Action:
        """Return what this machine, which wants to be in a round, does next."""
        state, now = context.state, time.monotonic()
        here = context.node in state.participants
        was_spare = self.spare
        listed = context.node in state.wait_list | state.redundancy_list
        self.spare = state.complete and listed and state.round != self.last
        if self.spare and not was_spare:
            text = (
                "the run has no place for this machine now: it takes that of a lost one, or joins"
            )
            say(*labelled("waits", text))
            self.no_place()
        ends = state.complete and not here and now < self.patient_until
        if self.spare or ends:  # the others go on, or their ranks have not ended yet
            self.deadline = now + self._settings.timeout.join.total_seconds()
        deadline = max(deadline, self.deadline)
        if state.complete and here:
            self.last = state.round
        if state.complete or state.closed or not (here and self.largest(len(state.participants))):
            self.enough_since = None
            return torchs(context, deadline)
        self.enough_since = self.enough_since or now
        over = deadline - MARGIN_SECONDS
        if not self._is_new():
            over = min(over, self.enough_since + REGROUP_SECONDS)
        return _Action.MARK_RENDEZVOUS_COMPLETE if now >= over else torchs(context, deadline)

    def leave(self, context: _RendezvousContext, deadline: float) -> _Action:
        """Return what this machine, which leaves the run, does next."""
        if context.node in context.state.participants:
            return _Action.REMOVE_FROM_PARTICIPANTS
        if context.node in context.state.wait_list:
            return _Action.REMOVE_FROM_WAIT_LIST
        if context.node in context.state.redundancy_list:
            return _Action.REMOVE_FROM_REDUNDANCY_LIST
        return _Action.FINISH

    def largest(self, machines: int) -> int:
        """Return with how many of so many machines the run goes; 0: with none."""
        return max((each for each in self.usable if each <= machines), default=0)

    def _is_new(self) -> bool:
        """Return whether this machine was not in the round before the one that is formed."""
        return self.last != self._state.round - 1

    def _add_to_participants(self) -> None:
        """Add this machine, until the round is formed with 0 if it was in the last, else with 1."""
        super()._add_to_participants()
        if not self._state.complete:
            self._state.participants[self._node] = int(self._is_new())

    def _mark_rendezvous_complete(self) -> None:
        """Form the round of as many as the run goes with, first of those that were in the last."""
        state, order = self._state, self._state.participants
        order[self._node] = int(self._is_new())  # torch may have just set 0
        most = self.largest(len(order))
        for spare in sorted(order, key=lambda node: (order[node], node))[most:]:
            del order[spare]
            state.wait_list.add(spare)
        super()._mark_rendezvous_complete()
