"""Who listens where, and that what others write to a rendezvous runs no code."""

import base64
import copyreg
import os
import pickle
import signal
import threading
import time
from datetime import UTC, datetime, timedelta, timezone

import psutil
import pytest
from torch.distributed import HashStore, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousParameters, RendezvousStateError
from torch.distributed.elastic.rendezvous import dynamic_rendezvous as dynamic
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend

from tests.support.commands import SECONDS, begun, needs_proc, ranks_of, start_run
from tests.support.full import FULL, full_but
from tests.support.machines import free_endpoint
from torchmars.cluster import connection, process, rendezvous
from torchmars.core.errors import UserError

RUN = "tiny"  # its name is that of the meeting
KEY = f"torch.rendezvous.{RUN}"
RAN = "TORCHMARS_TEST_RAN"


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


def test_a_store_that_cannot_be_shared_is_a_line(tmp_path, monkeypatch):
    """As where TMPDIR lies on a file system without locks. A folder cannot be locked either."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv(process.STORE_FILE, str(tmp_path))
    with pytest.raises(UserError, match=f"cannot share {tmp_path} .*: set TMPDIR to a folder of"):
        connection.open_store()


class Call:
    """What calls a function as soon as it is unpickled."""

    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


def touch(name):
    """Pickled code that leaves a variable in this process, or a file of that name."""
    return f"import os, pathlib; os.environ[{RAN!r}] = 'x'; pathlib.Path({name!r}).touch()"


def code_of(stranger, ran):
    """Write code where the launchers' state lies."""
    code = pickle.dumps(Call(exec, touch(str(ran))))
    stranger.set(KEY, base64.b64encode(code).decode())


def port_of_a_stranger(stranger, ran):
    """Join as the first machine, which tells the others where its ranks are, and tell nonsense."""
    found = pickle.loads(base64.b64decode(stranger.get(KEY)))
    [other] = found.participants
    first = node("", 1, 1)
    found.participants = {first: 0, other: 1}
    found.last_heartbeats[first] = datetime.now(UTC) + timedelta(days=1)
    found.complete, found.deadline = True, None
    stranger.set(f"{KEY}.0/MASTER_ADDR", "localhost")
    stranger.set(f"{KEY}.0/MASTER_PORT", "nonsense")
    stranger.set(KEY, base64.b64encode(pickle.dumps(found)).decode())


@needs_proc
@pytest.mark.parametrize(
    "write,said",
    [
        (code_of, "it asks for builtins.exec"),
        pytest.param(port_of_a_stranger, "nonsense", marks=FULL),
    ],
)
def test_a_launcher_that_waits_for_others_runs_nothing_of_theirs(config, tmp_path, write, said):
    """Anybody may reach the port at which several machines meet."""
    with free_endpoint() as endpoint:
        where = {"NNODES": "2", "NODE_RANK": "0", "RDZV_ENDPOINT": endpoint}
        launcher = start_run(config, ranks=1, NGPU="1", **where)
        host, port = endpoint.split(":")
        stranger = TCPStore(host, int(port), timeout=timedelta(seconds=SECONDS))
        while len(stranger.get(KEY)) < 100:  # it has not joined yet
            time.sleep(0.02)
        write(stranger, tmp_path / "ran")
        out, err = launcher.communicate(timeout=SECONDS)
    assert launcher.returncode == 69 and not (tmp_path / "ran").exists()
    *others, error = err.splitlines()  # torch has words of its own from 2.14 on
    said_first = f"warning   whoever reaches {endpoint} can join this run"
    assert any(each.startswith(said_first) for each in others)
    assert f"at the rendezvous {endpoint} is from no machine of this run" in error
    assert said in error and "Traceback" not in err


NOW = datetime.now(UTC)


def state(**parts):
    """A state of torch's own, with some parts replaced."""
    made = dynamic._RendezvousState()
    vars(made).update(parts)
    return made


def node(*parts):
    made = dynamic._NodeDesc.__new__(dynamic._NodeDesc)
    vars(made).update(zip(("addr", "pid", "local_id"), parts, strict=True))
    return made


def without(name):
    made = state()
    delattr(made, name)
    return made


HOSTILE = {
    "exec": Call(exec, touch("ran")),
    "eval": Call(eval, touch("ran").replace("import ", "__import__")),
    "in a part": state(deadline=Call(exec, touch("ran"))),
    "as a node": state(wait_list={1: Call(exec, touch("ran"))}),
    "torch's own": Call(dynamic._delay, 0),
    "an attribute": Call(getattr, datetime, "now"),
    "a class beside": Call(dynamic.RendezvousTimeout),
    "a name with dots": b"\x80\x04\x8c\x08datetime\x8c\x0cdatetime.now\x93)R.",
    "by copyreg": Call(copyreg._reconstructor, object, object, None),
    "a persistent id": b"\x80\x04\x8c\x01x\x51.",
    "a number": 7,
    "a set": {1},
    "a time": NOW,
    "a node": node("a", 1, 2),
    "a part too many": state(more=1),
    "a part too few": without("closed"),
    "a round of text": state(round="1"),
    "a round too large": state(round=10**5000),
    "a round before the first": state(round=-1),
    "a list of nodes": state(wait_list=[node("a", 1, 2)]),
    "a node of numbers": state(wait_list={node(1, 2, 3)}),
    "a rank of text": state(participants={node("a", 1, 2): "0"}),
    "participants of text": state(participants={"a": 0}),
    "a naive time": state(deadline=datetime(2026, 1, 1)),
    "a heartbeat of text": state(last_heartbeats={node("a", 1, 2): "now"}),
    "the last time of all": state(
        deadline=datetime.max.replace(tzinfo=timezone(-timedelta(hours=23)))
    ),
    "cut short": pickle.dumps(state())[:-9],
    "nothing": b"",
    "text": b"hello",
    "a long stack": b"(" * 100_000,
}


# Now: a test replaces what is named here.
HOSTILE = {
    case: each if isinstance(each, bytes) else pickle.dumps(each) for case, each in HOSTILE.items()
}


@pytest.fixture(autouse=True)
def quick_handlers(monkeypatch):
    """Let torch neither wait nor name callers, by a walk over frames, of which pytest has many."""
    monkeypatch.setattr(dynamic, "get_method_name", lambda depth=2: "")
    monkeypatch.setattr(dynamic, "_delay", lambda seconds: time.sleep(0.01))
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")  # as a launcher does


def handler(store, secret=None, nodes=2):
    """torch's own handler of a rendezvous, as a launcher makes it."""
    backend = rendezvous.Checked(C10dRendezvousBackend(store, RUN), RUN, secret)
    parameters = RendezvousParameters(
        "c10d", "", RUN, nodes, nodes, local_addr="127.0.0.1", join_timeout=60, last_call_timeout=1
    )
    return dynamic.create_handler(store, backend, parameters)


@pytest.mark.parametrize("case", HOSTILE)
def test_a_state_that_is_none_is_refused_however_it_comes(case, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(RAN, raising=False)
    store = HashStore()
    asking, writing = handler(store), handler(store)
    store.set(KEY, base64.b64encode(HOSTILE[case]).decode())
    with pytest.raises(RendezvousStateError):
        asking.num_nodes_waiting()
    writing._state_holder.mark_dirty()  # it has lost a compare-and-set: the other's state comes
    with pytest.raises(RendezvousStateError):
        writing.num_nodes_waiting()
    assert RAN not in os.environ and not (tmp_path / "ran").exists()


def test_some_of_these_would_run():
    """A test of the test: that the pickles are what they are meant to be."""
    os.environ.pop(RAN, None)
    with pytest.raises(FileNotFoundError):
        pickle.loads(pickle.dumps(Call(exec, touch("/nowhere/ran"))))
    assert os.environ.pop(RAN) == "x"
    assert pickle.loads(HOSTILE["a name with dots"]) > datetime(2026, 1, 1)


@pytest.mark.parametrize("secret", full_but(["a secret"], [None, "a secret"]))
def test_two_launchers_meet_twice(secret):
    store, met = HashStore(), {}

    def meet(number):
        mine = handler(store, secret)
        for round_number in range(2):
            info = mine.next_rendezvous()
            met[number, round_number] = info.rank, info.world_size
            while len(met) < 2 * (round_number + 1):
                time.sleep(0.01)
        mine._stop_heartbeats()

    threads = [threading.Thread(target=meet, args=(number,), daemon=True) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(met) == 4 and all(size == 2 for _, size in met.values())
    for round_number in range(2):
        assert sorted(met[number, round_number][0] for number in range(2)) == [0, 1]


@pytest.mark.parametrize(
    "first,second,message",
    [
        ("a secret", None, "it is signed by an RDZV_TOKEN, and this machine has none"),
        (None, "a secret", "it is not signed by the RDZV_TOKEN of this machine"),
        ("a secret", "another", "it is not signed by the RDZV_TOKEN of this machine"),
    ],
)
def test_launchers_of_different_secrets_do_not_meet(first, second, message):
    store = HashStore()
    here = handler(store, first)
    here._state_holder.mark_dirty()
    assert here.num_nodes_waiting() == 0
    there = handler(store, second)
    for _ in range(2):  # as it reads, and as it writes
        with pytest.raises(RendezvousStateError, match=message):
            there.num_nodes_waiting()
        there._state_holder.mark_dirty()
    assert here.num_nodes_waiting() == 0


def test_a_state_of_another_run_or_altered_is_not_signed():
    checked = rendezvous.Checked(C10dRendezvousBackend(HashStore(), RUN), RUN, "a secret")
    other = rendezvous.Checked(C10dRendezvousBackend(HashStore(), "other"), "other", "a secret")
    good = pickle.dumps(state())
    assert checked.checked(checked.signed(good)) == good
    altered = bytearray(checked.signed(good))
    altered[-2] ^= 1
    for stored in (other.signed(good), bytes(altered), good, checked.signed(good)[:40], b""):
        with pytest.raises(RendezvousStateError, match="not signed by"):
            checked.checked(stored)


@pytest.mark.parametrize("found", ["ended", "left", "just ending", "open", "none"])
def test_machines_may_meet_again_where_a_run_has_ended_alone(found, monkeypatch):
    """Its launchers are gone where nothing has changed after a while."""
    checked = rendezvous.Checked(C10dRendezvousBackend(HashStore(), RUN), RUN, "a secret")
    one = node("n1", 1, 0)
    before = state(round=3, complete=True, closed=found in ("ended", "just ending"))
    age = timedelta(seconds=2) if found == "open" else timedelta(hours=1)
    before.last_heartbeats = {one: datetime.now(UTC) - age}
    if found != "none":
        checked.set_state(pickle.dumps(before))
    slept, wrote = [], checked.get_state()

    def sleep(seconds):
        slept.append(seconds)
        if found == "just ending" and len(slept) < 3:
            before.last_heartbeats[one] += timedelta(seconds=2)
            checked.set_state(pickle.dumps(before), checked.get_state()[1])

    monkeypatch.setattr(rendezvous.time, "sleep", sleep)
    rendezvous.reopen(checked, 11)
    assert slept == [11] * {"ended": 1, "left": 1, "just ending": 3}.get(found, 0)
    if slept:
        assert vars(pickle.loads(checked.get_state()[0])) == vars(state(round=5))
    else:
        assert checked.get_state() == wrote
