"""The machines of a run: torch's rendezvous, which also notices that one of them is lost.

torch alone never notices a machine that falls silent while its ranks are waited for
(pytorch#111646), and judges the beats of machines by each other's clocks.
"""

import contextlib
import math
import secrets
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta

from torch.distributed import Store
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousBackend,
    RendezvousSettings,
    _BackendRendezvousStateHolder,  # torch 2.11 to 2.13 have both
    _NodeDesc,
    create_handler,
)

from torchmars.cluster import process
from torchmars.cluster.environment import beat_seconds, lost_seconds
from torchmars.core.console import harmless

LOOK_SECONDS = 2.0  # of a pause between looks at the beats that count: this machine may stand still
CLOSE_SECONDS = 3.0  # for a machine whose rank has failed to say that the run ends
ANCIENT = datetime.min.replace(tzinfo=UTC)
NEVER = 3e8  # seconds that torch lets a machine be silent, by whatever clocks: ten years


class Beats(_BackendRendezvousStateHolder):
    """The state of the machines, from which one is dropped once it has been silent for too long.

    A beat is a new value, whatever time it names. So the clocks of the machines need not agree.
    """

    def __init__(
        self, backend: RendezvousBackend, settings: RendezvousSettings, seconds: float
    ) -> None:
        super().__init__(backend, settings)
        self.seconds, self.looked, self.last_look = seconds, 0.0, time.monotonic()
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
            elif self.looked - self.seen[node][1] > self.seconds:
                beats[node] = ANCIENT
                self.silent.add(node)
        super()._sanitize()


class Membership(DynamicRendezvousHandler):
    """The rendezvous of several machines. Overrides private methods of torch 2.11 to 2.13."""

    _state_holder: Beats
    members: frozenset[_NodeDesc] = frozenset()
    """The machines of the newest round that this one has been in."""
    round = ""
    """That round: the name of the meeting, and a number that grows."""

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for the machines of the next round; name those of the last one that do not come."""
        self._store.set(f"machine/{self._this_node}", process.node())
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
        self.members = self._here()
        meeting = self._store.compare_set("meeting", "", secrets.token_hex(8)).decode()
        self.round = f"{meeting}:{self._state_holder.state.round}"
        return info

    def num_nodes_waiting(self) -> int:
        """Return how many machines wait, or have left this round or are lost: it has to end then.

        Raises `RendezvousClosedError` where the run has ended on them.
        """
        waiting = super().num_nodes_waiting()
        gone = len(self.members - self._here())
        if gone and self._state_holder.state.closed:
            raise RendezvousClosedError("the run has ended on other machines")
        return waiting or gone

    def change(self) -> str:
        """Return why the machines meet again, in words."""
        if self.members and self._this_node not in self._here():
            return "the other machines go on without this one"
        silent = self._names(self.members & self._state_holder.silent)
        return f"{silent} is silent" if silent else "those of another machine do"

    def ends(self) -> bool:
        """Return whether the machines will not meet again, after ranks of another one failed.

        That one says so at once. One that is lost says nothing.
        """
        deadline = time.monotonic() + CLOSE_SECONDS
        while not (closed := self.is_closed()) and time.monotonic() < deadline:
            if self.num_nodes_waiting():
                return False
            time.sleep(0.2)
        return closed

    def _here(self) -> frozenset[_NodeDesc]:
        return frozenset(self._state_holder.state.participants)

    def _names(self, nodes: frozenset[_NodeDesc]) -> str:
        return ", ".join(sorted(map(self._name, nodes)))

    def _name(self, node: _NodeDesc) -> str:
        with contextlib.suppress(RuntimeError):  # the store's
            if self._store.check([f"machine/{node}"]):
                return harmless(self._store.get(f"machine/{node}").decode(errors="replace"))[:100]
        return node.addr


def meet(store: Store, backend: RendezvousBackend, parameters: RendezvousParameters) -> Membership:
    """Return the rendezvous of several machines at `store`, whose state `backend` keeps."""
    made = create_handler(store, backend, parameters)
    machines = parameters.max_nodes
    beat = beat_seconds(machines)
    settings = replace(
        made.settings,
        keep_alive_interval=timedelta(seconds=beat),
        keep_alive_max_attempt=int(NEVER / beat),
    )
    seconds = parameters.get_as_int("lost_seconds", lost_seconds(machines)) or math.inf
    holder = Beats(backend, settings, seconds)
    return Membership(made._this_node, settings, backend.name, store, holder)
