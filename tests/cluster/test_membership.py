"""A machine that falls silent, and what the others do."""

import pickle
import threading
import time
from datetime import UTC, datetime, timedelta
from functools import partial

import pytest
from torch.distributed import HashStore, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousParameters,
    RendezvousStateError,
)
from torch.distributed.elastic.rendezvous import dynamic_rendezvous as dynamic
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend

from tests.support.machines import Way, free_endpoint
from torchmars.cluster import membership, rendezvous
from torchmars.cluster.environment import beat_seconds, lost_seconds

HOUR = timedelta(hours=1)


class Clock:
    """The module `time`, whose clock is set by hand."""

    now = 100.0

    def monotonic(self):
        return self.now


@pytest.fixture
def meeting(monkeypatch):
    """The state of machines n1 and n2, as n1 sees it, and n1's clock."""
    clock = Clock()
    monkeypatch.setattr(membership.time, "monotonic", clock.monotonic)
    backend = C10dRendezvousBackend(HashStore(), "run")
    parameters = RendezvousParameters("c10d", "n1:1", "run", 2, 2, local_addr="n1")
    mine = membership.meet(HashStore(), backend, parameters)
    mine._state_holder._cache_duration = 0
    other = dynamic._NodeDesc("n2", 7, 0)
    state = dynamic._RendezvousState()
    state.complete, state.participants = True, {mine._this_node: 0, other: 1}
    state.last_heartbeats = {mine._this_node: datetime.now(UTC), other: datetime.now(UTC) - HOUR}
    backend.set_state(pickle.dumps(state))
    mine.num_nodes_waiting()
    mine.members = mine._here()

    def beat(*nodes):
        """The next beats of some machines, of which n2's clock is an hour late."""
        found, token = backend.get_state()
        changed = pickle.loads(found)
        for node in nodes:
            changed.last_heartbeats[node] += timedelta(seconds=2)
        backend.set_state(pickle.dumps(changed), token)

    return mine, other, clock, beat


def test_a_machine_is_lost_once_its_beats_do_not_change(meeting):
    mine, other, clock, beat = meeting
    for _ in range(40):
        clock.now += 1.9
        beat(mine._this_node, other)
        assert mine.num_nodes_waiting() == 0
    seconds = 0.0
    while not mine.num_nodes_waiting():
        clock.now += 1.0
        seconds += 1.0
        beat(mine._this_node)
        assert seconds < 20
    assert seconds == lost_seconds(2) + 1 <= 3 * 2 + 4
    assert mine.change() == "n2 fell silent"
    mine._state_holder.state.closed = True
    mine._state_holder.mark_dirty()
    with pytest.raises(RendezvousClosedError):
        mine.num_nodes_waiting()


def test_a_machine_that_stood_still_itself_does_not_take_the_others_for_lost(meeting):
    mine, other, clock, beat = meeting
    clock.now += 3600
    assert mine.num_nodes_waiting() == 0
    clock.now += 1
    beat(mine._this_node, other)
    assert mine.num_nodes_waiting() == 0


def test_a_machine_that_the_others_have_dropped_starts_again(meeting):
    mine, other, _, _ = meeting
    mine.members |= {mine._this_node}
    backend = mine._state_holder._backend
    found, token = backend.get_state()
    state = pickle.loads(found)
    del state.participants[mine._this_node], state.last_heartbeats[mine._this_node]
    backend.set_state(pickle.dumps(state), token)
    assert mine.num_nodes_waiting() == 1
    assert mine.change() == "the other machines go on without this one"


def test_seconds_by_the_number_of_machines():
    numbers = (2, 32, 33, 1000)
    assert [beat_seconds(each) for each in numbers] == [2, 2, 3, 63]
    assert [lost_seconds(each) for each in numbers] == [8, 8, 11, 191]


def test_a_machine_whose_clock_is_set_back_goes_on_beating(meeting):
    mine, _, clock, _ = meeting
    backend = mine._state_holder._backend
    found, token = backend.get_state()
    state = pickle.loads(found)
    state.last_heartbeats[mine._this_node] += HOUR
    backend.set_state(pickle.dumps(state), token)
    mine._keep_alive()
    assert pickle.loads(backend.get_state()[0]).last_heartbeats[mine._this_node] < datetime.now(UTC)


def test_a_machine_without_a_place_does_not_end_the_run_of_others(meeting):
    mine, other, _, _ = meeting
    backend = mine._state_holder._backend
    found, token = backend.get_state()
    state = pickle.loads(found)
    del state.participants[mine._this_node]
    backend.set_state(pickle.dumps(state), token)
    mine.set_closed()
    assert not pickle.loads(backend.get_state()[0]).closed
    found, token = backend.get_state()
    state = pickle.loads(found)
    state.participants[mine._this_node] = 0
    backend.set_state(pickle.dumps(state), token)
    mine.set_closed()
    assert pickle.loads(backend.get_state()[0]).closed


def test_what_strangers_write_of_machines_is_a_line_or_ends_the_start(meeting, monkeypatch):
    mine, other, _, _ = meeting
    mine._store.set(f"run/machine/{other}", "n2\nerror: \x1b[2Jdone")
    assert "\n" not in mine._name(other) and "\x1b" not in mine._name(other)
    monkeypatch.setattr(dynamic.DynamicRendezvousHandler, "next_rendezvous", lambda self: None)
    mine._store.set("run/meeting", "a\0")  # ranks get it in their environment
    with pytest.raises(RendezvousStateError):
        mine.next_rendezvous()


def test_a_machine_that_is_cut_off_from_the_store_does_not_wait_for_it():
    """torch alone waits for an answer that never comes, at each question."""
    with free_endpoint() as endpoint, Way(endpoint) as way:
        host, port = endpoint.split(":")
        server = TCPStore(host, int(port), is_master=True, wait_for_workers=False)
        options = {"is_host": "0", "local_addr": host, "read_timeout": "600", "lost_seconds": "8"}
        mine = rendezvous.join(
            RendezvousParameters("c10d", way.address, "run", 2, 2, **options), None, lambda: None
        )
        assert mine.num_nodes_waiting() == 0
        way.cut = True
        backend = mine._state_holder._backend
        # Beats come every 2 s, and the others count from the last one.
        assert backend.seconds == 6
        backend.seconds = 1
        asked = []
        backend.backend.get_state = partial(counted, backend.backend.get_state, asked)
        for _ in range(2):
            mine._state_holder._last_sync_time = -1  # it is asked once a second otherwise
            with pytest.raises(RendezvousConnectionError, match="has not answered for 1 s"):
                mine.num_nodes_waiting()
        assert len(asked) == 1  # not again, which would take as long
        del server


def counted(function, calls):
    calls.append(function)
    return function()


def test_a_machine_that_waits_at_the_store_goes_on_beating():
    """As it does at the end, for machines whose ranks are not done yet."""
    with free_endpoint() as endpoint:
        host, port = endpoint.split(":")
        server = TCPStore(host, int(port), is_master=True, wait_for_workers=False)
        options = {"is_host": "0", "local_addr": host}
        parameters = RendezvousParameters("c10d", endpoint, "run", 2, 2, **options)
        mine, other = (rendezvous.join(parameters, None, lambda: None) for _ in range(2))
        starts = [threading.Thread(target=each.next_rendezvous) for each in (mine, other)]
        for start in starts:
            start.start()
        for start in starts:
            start.join()
        waits = threading.Thread(target=mine._store.wait, args=(["end"], HOUR), daemon=True)
        waits.start()
        beats, deadline = set(), time.monotonic() + 120
        while len(beats) < 3 and time.monotonic() < deadline:
            other.num_nodes_waiting()
            beats.add(other._state_holder.state.last_heartbeats[mine._this_node])
            time.sleep(0.2)
        assert waits.is_alive() and len(beats) >= 3
        server.set("end", "")
        waits.join()
        for each in (mine, other):
            each._stop_heartbeats()
