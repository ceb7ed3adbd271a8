"""A machine that falls silent, and what the others do."""

import pickle
from datetime import UTC, datetime, timedelta

import pytest
from torch.distributed import HashStore
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousParameters
from torch.distributed.elastic.rendezvous import dynamic_rendezvous as dynamic
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend

from torchmars.cluster import membership
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
    assert mine.change() == "n2 is silent"
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
