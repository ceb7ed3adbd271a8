"""The rendezvous of the launchers, of which there is one on each machine.

torch unpickles the contents of a rendezvous' store, and whoever reaches the store can write there.
So one launcher alone has a store within its own process, and several check the data that they read.
"""

import contextlib
import hmac
import io
import os
import pickle
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone
from functools import partial
from typing import Any, TypeVar, cast

from torch.distributed import HashStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousParameters,
    RendezvousStateError,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import (
    C10dRendezvousBackend,
    create_backend,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    RendezvousBackend,
    Token,
    _NodeDesc,  # torch 2.11 to 2.13 have both
    _RendezvousState,
    create_handler,
)

from torchmars.cluster.environment import beat_seconds, lost_seconds
from torchmars.cluster.membership import meet, unanswered
from torchmars.core.timers import done_in

T = TypeVar("T")

SIGNED = b"signed by RDZV_TOKEN "  # begins a state that is followed by its digest and itself
DIGEST_BYTES = 32
OLD = timedelta(minutes=1)  # an age of all beats from which they may be those of an earlier run
ALLOWED = {
    (each.__module__, each.__name__): each
    for each in (_RendezvousState, _NodeDesc, datetime, timedelta, timezone)
}


def join(
    parameters: RendezvousParameters, secret: str | None, connected: Callable[[], None]
) -> RendezvousHandler:
    """Return the rendezvous at which this launcher meets the others, if there may be others.

    `secret` is RDZV_TOKEN. `connected` is called once the store of the machines has answered.
    Raises torch's `RendezvousError`.
    """
    parameters.backend = "c10d"
    if parameters.max_nodes == 1:
        connected()
        store = HashStore()
        return create_handler(store, C10dRendezvousBackend(store, parameters.run_id), parameters)
    backend, shared = create_backend(parameters)
    connected()
    lost = parameters.get_as_int("lost_seconds", lost_seconds(parameters.max_nodes))
    # The others count from the last beat that they have seen.
    seconds = max(1, lost - beat_seconds(parameters.max_nodes)) if lost else None
    checked = Checked(backend, parameters.run_id, secret, seconds)
    if reopen(checked, lost_seconds(parameters.max_nodes)):
        shared.add(f"{parameters.run_id}/launches", 1)
    # A connection waits for one answer at a time, and the machine has to show that it lives.
    return meet(cast(Any, shared).clone(), checked, parameters)


def reopen(backend: RendezvousBackend, seconds: float) -> bool:
    """Let machines meet where a run has ended: its store may live on, apart from all machines.

    Returns whether this machine has done so. The launchers of that run are gone if their state has
    not changed after `seconds`. Those of one that is closed are waited for.
    """
    while (found := backend.get_state()) is not None:
        before: _RendezvousState = StateUnpickler(io.BytesIO(found[0])).load()
        old = datetime.now(UTC) - OLD
        if not before.closed and any(beat > old for beat in before.last_heartbeats.values()):
            return False
        time.sleep(seconds)
        if backend.get_state() == found:
            state = _RendezvousState()
            # What lies in the store under earlier rounds is theirs. And a launcher of theirs that
            # wakes up has not been in the round before.
            state.round = before.round + 2
            changed = backend.set_state(pickle.dumps(state), found[1])
            return changed is not None and changed[2]
    return False


class Checked(RendezvousBackend):
    """A backend whose state is unpickled only if it is one, and signed where there is a secret.

    A store that does not answer for some `seconds` cannot be reached: this machine is lost to the
    others then. torch would wait for the answer, without end where the network is cut.
    """

    def __init__(
        self,
        backend: RendezvousBackend,
        run_id: str,
        secret: str | None,
        seconds: float | None = None,
    ) -> None:
        self.backend, self.run_id, self.secret, self.seconds = backend, run_id, secret, seconds
        self.silent = False
        """Whether the store has not answered, for any thread of this process."""

    @property
    def name(self) -> str:
        return self.backend.name

    def get_state(self) -> tuple[bytes, Token] | None:
        found = self.answer(self.backend.get_state)
        return found and (self.checked(found[0]), found[1])

    def set_state(
        self, state: bytes, token: Token | None = None
    ) -> tuple[bytes, Token, bool] | None:
        # Where another launcher has written before, it is that one's state that comes back.
        found = self.answer(partial(self.backend.set_state, self.signed(state), token))
        return found and (self.checked(found[0]), *found[1:])

    def answer(self, ask: Callable[[], T]) -> T:
        """Return what the store answers. Raises `RendezvousConnectionError` if it does not."""
        with contextlib.suppress(TimeoutError):
            if not self.silent:
                return done_in(self.seconds, ask)
        assert self.seconds is not None  # else an answer is waited for
        self.silent = True
        raise unanswered(self.seconds)

    def signed(self, state: bytes) -> bytes:
        """Return a state as it lies in the store."""
        if self.secret is None:
            return state
        text = self.run_id.encode() + b"\0" + state
        return SIGNED + hmac.digest(os.fsencode(self.secret), text, "sha256") + state

    def checked(self, stored: bytes) -> bytes:
        """Return the state that lies in the store. Raises `RendezvousStateError` for another."""
        state = stored
        if self.secret is not None:
            state = stored[len(SIGNED) + DIGEST_BYTES :]
            if not hmac.compare_digest(self.signed(state), stored):
                raise RendezvousStateError("it is not signed by the RDZV_TOKEN of this machine")
        elif stored.startswith(SIGNED):
            raise RendezvousStateError("it is signed by an RDZV_TOKEN, and this machine has none")
        try:
            found = StateUnpickler(io.BytesIO(state)).load()
        except Exception as error:  # whatever bytes of others make of the unpickler
            raise RendezvousStateError(f"it cannot be read: {error}") from None
        if not is_state(found):
            raise RendezvousStateError("it is no state of a rendezvous")
        return state


class StateUnpickler(pickle.Unpickler):
    """Reads the state of a rendezvous without running code that it brings."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return ALLOWED[module, name]


def is_state(found: object) -> bool:
    """Return whether all parts of the unpickled data have the types that torch expects."""
    if type(found) is not _RendezvousState or vars(found).keys() != vars(_RendezvousState()).keys():
        return False
    nodes = (found.participants, found.last_heartbeats, found.wait_list, found.redundancy_list)
    return (
        all(map(is_count, (found.round, found.complete, found.closed)))
        and all(map(isinstance, nodes, (dict, dict, set, set)))
        and all(is_node(each) for group in nodes for each in group)
        and all(map(is_count, found.participants.values()))
        and all(map(is_time, found.last_heartbeats.values()))
        and (found.deadline is None or is_time(found.deadline))
    )


def is_count(value: object) -> bool:
    """Return whether a value is a whole number that any part of torch can take."""
    return isinstance(value, int) and 0 <= value < 2**31


def is_node(value: object) -> bool:
    """Return whether a value names a launcher."""
    return (
        isinstance(value, _NodeDesc)
        and isinstance(value.addr, str)
        and is_count(value.pid)
        and is_count(value.local_id)
    )


def is_time(value: object) -> bool:
    """Return whether a value is a time that can be compared with the present."""
    return isinstance(value, datetime) and value.tzinfo == UTC
