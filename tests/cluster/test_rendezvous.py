"""Machines that meet: who is in a round, who is lost, and what strangers can do."""

import contextlib
import os
import random
import signal
import threading
import time
from datetime import timedelta

import psutil
import pytest
from torch.distributed import HashStore, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousStateError,
    RendezvousTimeoutError,
)

from tests.support.commands import SECONDS, begun, needs_proc, ranks_of, start_run
from tests.support.full import FULL, full_but
from tests.support.machines import Way, free_endpoint
from torchmars.cluster import rendezvous
from torchmars.cluster.document import Document, read_document
from torchmars.cluster.endpoint import open_meeting
from torchmars.cluster.environment import Environment, beat_seconds, lost_seconds
from torchmars.cluster.rendezvous import Machines
from torchmars.cluster.sizes import MinMax, UsableSizes
from torchmars.core.errors import UserError

RUN = "tiny"  # its name is that of the meeting
KEY = f"{RUN}/machines/document"


@needs_proc
def test_a_run_on_one_machine_listens_nowhere_else(config, monkeypatch):
    """Also after a restart, whose ranks find each other by a new file."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    run = begun(config, ranks=4, MAX_RESTARTS="1")

    def addresses():
        everyone = [launcher, *launcher.children(recursive=True)]
        sockets = [each for one in everyone for each in one.net_connections(kind="inet")]
        return {each.laddr.ip for each in sockets if each.status == psutil.CONN_LISTEN}

    launcher = psutil.Process(run.pid)
    assert addresses() == {"127.0.0.1"}
    os.kill(ranks_of(run.pid)[1], signal.SIGKILL)
    assert any(line.startswith("run  ") for line in run.stdout), "no second start"
    assert any(line.startswith("step  ") for line in run.stdout)
    assert addresses() == {"127.0.0.1"}
    run.kill_group()
    run.communicate(timeout=SECONDS)


class Meeting:
    """Machines of one process that meet at a store of it."""

    def __init__(self):
        self.store, self.machines = HashStore(), {}

    def __call__(self, name, usable=(1, 2, 3), asked=None, connect=None, **own):
        sizes = UsableSizes(asked or MinMax(1, 3), usable, 1, 1)
        own = Environment(**{"RDZV_TIMEOUT": 300, "JOIN_SECONDS": 0} | own)
        made = self.machines[name] = Machines(RUN, own, sizes, connect or (lambda: self.store))
        made.name = name
        return made

    def meet(self, *names):
        """Let machines meet; their places in the round, or their errors."""
        found = {}

        def meet(name):
            try:
                doc = self.machines[name].meet()
                found[name] = doc.members.index(self.machines[name].me), len(doc.members)
            except Exception as error:
                found[name] = error

        threads = [threading.Thread(target=meet, args=(name,), daemon=True) for name in names]
        for each in threads:
            each.start()
        for each in threads:
            each.join(600)
        return found

    def read(self):
        return read_document(self.store.get(KEY).decode().partition(" ")[2])


@pytest.fixture
def meeting(monkeypatch):
    monkeypatch.setattr(rendezvous, "LOOK_SECONDS", 0.02)
    made = Meeting()
    yield made
    for each in made.machines.values():
        each.left = True


def until(condition):
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("secret", full_but(["a secret"], [None, "a secret"]))
def test_machines_meet_again_and_ranks_stay_where_they_were(meeting, secret):
    for name in "abc":
        meeting(name, RDZV_TOKEN=secret)
    found = meeting.meet(*"abc")
    assert sorted(found.values()) == [(0, 3), (1, 3), (2, 3)]
    first = min(found, key=lambda name: found[name])
    for each in meeting.machines.values():
        each.change_round(lambda doc: doc.end_round("a reason"))
    assert meeting.meet(*"cba") == found
    last = max(found, key=lambda name: found[name])
    meeting.machines[first].leave()
    until(lambda: meeting.machines[last].is_over())
    assert meeting.machines[last].change_in_words() == f"{first} has ended"
    others = [*{*"abc"} - {first}]
    assert {place for place in meeting.meet(*others).values()} == {(0, 2), (1, 2)}


def test_a_machine_is_lost_once_its_beats_do_not_change(meeting, monkeypatch):
    """It finds itself in no list once it wakes up, and comes again."""
    monkeypatch.setattr(rendezvous, "beat_seconds", lambda machines: 0.2)
    sizes = {"asked": MinMax(1, 2), "usable": (1, 2), "LOST_SECONDS": 4.0}
    a, b = meeting("a", **sizes), meeting("b", **sizes)
    assert {*meeting.meet("a", "b").values()} == {(0, 2), (1, 2)}
    stands = threading.Event()
    original = b._judge
    b._judge = lambda: stands.wait() and original()  # its thread stands still
    until(lambda: a.is_over())
    assert a.change_in_words() == "b fell silent"
    assert meeting.meet("a") == {"a": (0, 1)}
    stands.set()
    until(lambda: b.is_over())
    assert b.change_in_words() == "the other machines go on without this one"


def test_a_machine_that_beats_and_never_ends_keeps_no_other(meeting, monkeypatch):
    """Its launcher may hang where it beats no less."""
    monkeypatch.setattr(rendezvous, "BACK_SECONDS", 0.5)
    a = meeting("a", usable=(1, 2), asked=MinMax(1, 2))
    meeting("b", usable=(1, 2), asked=MinMax(1, 2))
    meeting.meet("a", "b")
    with pytest.raises(RendezvousTimeoutError, match="no end of theirs"):
        a.done(75)
    a.timeout = 0.5
    a.change_round(lambda doc: doc.end_round("a reason"))
    (error,) = meeting.meet("a").values()
    assert str(error) == "b did not come back in 0.5 s, nor another machine instead"


def test_seconds_by_the_number_of_machines():
    numbers = (2, 32, 33, 1000)
    assert [beat_seconds(each) for each in numbers] == [2, 2, 3, 63]
    assert [lost_seconds(each) for each in numbers] == [8, 8, 11, 191]


def test_a_first_start_waits_for_all_and_says_who_has_come(meeting):
    meeting("a", usable=(2, 3), RDZV_TIMEOUT=2.5)
    (error,) = meeting.meet("a").values()
    assert isinstance(error, RendezvousTimeoutError)
    assert str(error) == "only a came in 2.5 s, and 2 are needed"


def test_a_machine_asks_for_the_end_of_a_round_where_others_come_or_leave(meeting, monkeypatch):
    monkeypatch.setattr(rendezvous, "LEAVE_SECONDS", 0.0)
    sizes = {"asked": MinMax(1, 2), "usable": (1, 2)}
    a, b = meeting("a", **sizes, RDZV_TIMEOUT=3.0), meeting("b", **sizes)
    assert meeting.meet("a") == {"a": (0, 1)}
    a.timeout = 300.0
    threading.Thread(target=meeting.meet, args=("b",), daemon=True).start()
    until(lambda: a.look().waiting)
    assert a.asked() == ""  # no step since
    a.reached = lambda: 7
    until(lambda: b.spare)
    assert a.asked() == "memory"
    assert not a.done(None)
    assert a.change_in_words() == "b joins"
    a.reached = lambda: 0
    assert meeting.meet("a")["a"] == (0, 2)
    assert a.asked("SIGTERM") == "memory SIGTERM"
    until(lambda: b.round == a.round and b.asked() == "memory SIGTERM")
    done = []
    threading.Thread(target=lambda: done.append(b.done(None)), daemon=True).start()
    assert a.done(None)
    until(lambda: done)
    assert done == [False] and b.change_in_words() == "a leaves"


@pytest.mark.parametrize("asked", [MinMax(1, 3), MinMax(3, 3)])
def test_machines_of_other_sizes_are_refused(meeting, asked, monkeypatch):
    monkeypatch.setattr(rendezvous, "beat_seconds", lambda machines: 0.2)
    meeting("a", asked=asked, usable=(1,))
    meeting.meet("a")
    meeting("b", asked=MinMax(1, 2), usable=(1, 2))
    (error,) = meeting.meet("b").values()
    said = f"b has NNODES = 1:2 and NGPU = 1, and the first machine NNODES = {asked} and NGPU = 1"
    assert isinstance(error, UserError) and str(error).startswith(said)


def test_runs_in_turn_meet_at_one_store(meeting, monkeypatch):
    """Also where all launchers of one were killed: they are waited for as long as a lost one."""
    monkeypatch.setattr(rendezvous, "beat_seconds", lambda machines: 0.2)
    a = meeting("a", usable=(1,), asked=MinMax(1, 1))
    meeting.meet("a")
    assert a.done(75) and a.ending()[0] == 75
    b = meeting("b", usable=(1,), asked=MinMax(1, 1), LOST_SECONDS=1.0)
    assert meeting.meet("b") == {"b": (0, 1)} and b.run == a.run + 1 and b.round > a.round
    until(lambda: a.look().run == b.run)
    assert a.is_closed()
    b.left = True  # it is killed: its thread ends
    c = meeting("c", usable=(1,), asked=MinMax(1, 1), LOST_SECONDS=1.0)
    assert meeting.meet("c") == {"c": (0, 1)} and c.run == b.run + 1


@pytest.mark.parametrize(
    "first,second,message",
    [
        ("a secret", None, "it is no document of machines without an RDZV_TOKEN"),
        (None, "a secret", "it is not signed by the RDZV_TOKEN of this machine"),
        ("a secret", "another", "it is not signed by the RDZV_TOKEN of this machine"),
    ],
)
def test_launchers_of_different_secrets_do_not_meet(meeting, first, second, message):
    a = meeting("a", RDZV_TOKEN=first)
    threading.Thread(target=meeting.meet, args=("a",), daemon=True).start()
    until(lambda: a.document.n)
    meeting("b", RDZV_TOKEN=second)
    (error,) = meeting.meet("b").values()
    assert isinstance(error, RendezvousStateError) and message in str(error)
    assert a.look().n


def hostile_values(secret):
    """300 random and 30 hostile values of the document, by strangers who have no secret."""
    chance = random.Random(1)
    good = Document("f" * 16, n=50, round=9)
    values = [b"", b"-", b"- ", b"hello", b"\xff" * 99, b"- " + b"[" * 10**5, b"0" * 64 + b" {}"]
    for number in range(23):
        forged = Document("e" * 16, n=number * 1000, round=number, closed="done" * (number % 2))
        values.append(f"{'- ' if number % 3 else 'f' * 64 + ' '}{forged.text()}".encode())
    for _ in range(300):
        raw = bytearray(f"- {good.text()}".encode())
        for _ in range(chance.randint(1, 9)):
            raw[chance.randrange(len(raw))] = chance.randrange(256)
        values.append(bytes(raw))
    return values


@pytest.mark.full
@pytest.mark.parametrize("secret", [None, "a secret"])
def test_forged_documents_end_a_machine_in_a_line_or_do_nothing(monkeypatch, secret):
    monkeypatch.setattr(rendezvous, "LOOK_SECONDS", 0.01)
    values = hostile_values(secret)
    assert len(values) == 330
    for value in values:
        meeting = Meeting()
        machine = meeting("a", usable=(1,), asked=MinMax(1, 2), RDZV_TOKEN=secret)
        meeting.meet("a")
        answers = machine.answers
        meeting.store.set(KEY, value)
        with contextlib.suppress(RendezvousStateError, RendezvousClosedError):
            deadline = time.monotonic() + 300
            while machine.answers < answers + 3 and time.monotonic() < deadline:
                machine.is_over()
                time.sleep(0.005)
            assert secret is None  # what is not signed is never believed
        machine.left = True


def test_an_old_document_is_not_put_back(meeting):
    a = meeting("a", RDZV_TOKEN="a secret")
    threading.Thread(target=meeting.meet, args=("a",), daemon=True).start()
    until(lambda: a.document.n)
    old = meeting.store.get(KEY)
    b = meeting("b", RDZV_TOKEN="a secret", usable=(3,))
    threading.Thread(target=meeting.meet, args=("b",), daemon=True).start()
    until(lambda: len(a.document.here) == 2)
    meeting.store.set(KEY, old)
    with pytest.raises(RendezvousStateError, match="older than what this machine has read"):
        until(lambda: not a.look())
    assert b.me != a.me


def test_a_machine_that_is_cut_off_from_the_store_does_not_wait_for_it(monkeypatch):
    """A call there has no time limit: it may wait for an answer that never comes."""
    with free_endpoint() as endpoint, Way(endpoint) as way:
        host, port = endpoint.split(":")
        server = TCPStore(host, int(port), is_master=True, wait_for_workers=False)
        near, far = way.address.split(":")
        meeting = Meeting()
        machine = meeting("a", usable=(1,), connect=lambda: open_meeting(near, int(far)))
        assert meeting.meet("a") == {"a": (0, 1)}
        assert machine.lost - machine.beat_seconds == 6  # the others count from the last beat
        machine.lost = 3.0
        way.cut = True
        with pytest.raises(RendezvousConnectionError, match="has not answered for 1 s"):
            until(lambda: not machine.look())
        began = time.monotonic()
        assert not machine.leave() and time.monotonic() < began + 60
        del server


def forge(stranger, ran):
    """Join as the first machine, which tells the others where its ranks are."""
    digest, _, text = stranger.get(KEY).decode().partition(" ")
    doc = read_document(text)
    me = "a" * 16
    doc.members, doc.here, doc.n = [me, *doc.here], [], doc.n + 1
    doc.machines[me] = ["stranger", "localhost", 9]
    stranger.set(KEY, f"{digest} {doc.text()}")


def code_of(stranger, ran):
    """Write what pickle would run."""
    stranger.set(KEY, b"- cos\nsystem\n(S'touch " + os.fsencode(ran) + b"'\ntR.")


@needs_proc
@pytest.mark.parametrize(
    "write,token,said",
    [
        (code_of, None, "it is no document of machines"),
        pytest.param(code_of, "a secret", "it is not signed by the RDZV_TOKEN", marks=FULL),
        (forge, "a secret", "it is not signed by the RDZV_TOKEN of this machine"),
    ],
)
def test_a_launcher_that_waits_for_others_believes_nothing_unsigned(
    config, tmp_path, write, token, said
):
    """Anybody may reach the port at which several machines meet."""
    with free_endpoint() as endpoint:
        where = {"NNODES": "2", "NODE_RANK": "0", "RDZV_ENDPOINT": endpoint}
        where |= {} if token is None else {"RDZV_TOKEN": token}
        launcher = start_run(config, ranks=1, NGPU="1", **where)
        host, port = endpoint.split(":")
        stranger = TCPStore(host, int(port), timeout=timedelta(seconds=SECONDS))
        until(lambda: stranger.check([KEY]) and b'"here": ["' in stranger.get(KEY))
        write(stranger, tmp_path / "ran")
        out, err = launcher.communicate(timeout=SECONDS)
    assert launcher.returncode == 69 and not (tmp_path / "ran").exists()
    *others, error = err.splitlines()
    warned = f"warning   whoever reaches {endpoint} can join this run"
    assert any(each.startswith(warned) for each in others) == (token is None)
    assert f"at the rendezvous {endpoint} is from no machine of this run ({said}" in error
    assert "Traceback" not in err


@needs_proc
def test_a_loopback_endpoint_listens_there_alone(config):
    with free_endpoint() as endpoint:
        launcher = start_run(config, ranks=1, NGPU="1", NNODES="2", RDZV_ENDPOINT=endpoint)
        port = int(endpoint.partition(":")[2])

        def listening():
            sockets = psutil.Process(launcher.pid).net_connections(kind="inet")
            return {each.laddr for each in sockets if each.status == psutil.CONN_LISTEN}

        until(lambda: any(place.port == port for place in listening()))
        assert {place.ip for place in listening()} == {"127.0.0.1"}
        launcher.kill_group()
        launcher.communicate(timeout=SECONDS)
