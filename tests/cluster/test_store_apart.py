"""A rendezvous in a process of its own, `torchmars rendezvous`, and runs that meet there."""

import re
import signal
import socket

import psutil
import pytest

from tests.support.commands import ROOT, needs_proc, run_command
from tests.support.full import FULL
from tests.support.machines import (
    Way,
    free_endpoint,
    machine,
    machine_of_first_rank,
    signal_all,
    start_store,
    tree_of,
    wait_for,
)
from tests.support.same_end import check_same_end, tables_of
from tests.support.tiny import metrics, run_folder_of, write_text
from torchmars.checkpoint.memory import shared_memory
from torchmars.core.errors import EXIT_UNCONNECTED

FAR = "10.77.77.77:29400"  # of no machine


@needs_proc
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_listens_at_its_address_alone_until_a_signal(number):
    with free_endpoint() as endpoint:
        store = start_store(endpoint)
        sockets = psutil.Process(store.pid).net_connections(kind="inet")
        found = {each.laddr for each in sockets if each.status == psutil.CONN_LISTEN}
        assert {f"{ip}:{port}" for ip, port in found} == {endpoint}
        store.send_signal(number)
        assert store.communicate() == (f"ended     by {number.name}\n", "")
        assert store.returncode == 0


def test_mistakes_are_a_line(monkeypatch):
    monkeypatch.delenv("RDZV_TOKEN", raising=False)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        here = f"127.0.0.1:{other.getsockname()[1]}"
        for endpoint, token, message in (
            (FAR, None, f"whoever reaches {FAR} could join the runs that meet there: set RDZV_"),
            (f"0.0.0.0:{here[10:]}", None, "whoever reaches 0.0.0.0:"),
            (FAR, "a secret", f"the rendezvous {FAR}: .* cannot listen there"),
            (here, None, f"the rendezvous {here}: .* cannot listen there"),
            ("nowhere", None, "ENDPOINT must be HOST:PORT, with a port from 1 to 65535"),
            (here, "", "RDZV_TOKEN is empty"),
        ):
            if token is not None:
                monkeypatch.setenv("RDZV_TOKEN", token)
            code, out, err = run_command("rendezvous", [endpoint], ROOT)
            monkeypatch.delenv("RDZV_TOKEN", raising=False)
            assert (code, out) == (2, "") and err.count("\n") == 1, err
            assert re.match(f"error: {message}", err), err


def two_machines(tables, *endpoints, **options):
    """Start two machines that meet at a store apart; wait until their run makes steps.

    `endpoints` are one for both, or one for each.
    """
    places = zip(("n1", "n2"), endpoints * 2)
    machines = [machine(tables, name, place, **options) for name, place in places]
    file = run_folder_of(tables) / "metrics.jsonl"
    wait_for(lambda: file.exists() and max(metrics(tables), default=0) > 10, *machines)
    return machines


@needs_proc
def test_without_it_all_machines_end_and_publish_nothing(tmp_path):
    write_text(tmp_path)
    tables = tables_of(tmp_path, "run", 10**6, {"checkpoint": {"interval": 10**6}})
    with free_endpoint() as endpoint:
        store = start_store(endpoint)
        machines = two_machines(tables, endpoint)
        trees = [process for each in machines for process in tree_of(each)]
        store.kill()
        assert [each.wait() for each in machines] == [EXIT_UNCONNECTED] * 2
    wait_for(lambda: not any(map(psutil.pid_exists, trees)))
    assert not list((run_folder_of(tables) / "checkpoints").glob("step-*"))
    for name in ("n1", "n2"):
        said = (tmp_path / f"{name}.log").read_text()
        assert said.count("error: ") == 1 and " has lost the other machines: " in said, said


@FULL
@needs_proc
def test_a_machine_that_is_cut_off_ends_and_is_waited_for_and_named(tmp_path):
    write_text(tmp_path)
    tables = tables_of(tmp_path, "run", 10**6, {"checkpoint": {"interval": 10**6}})
    with free_endpoint() as endpoint, Way(endpoint) as way:
        store = start_store(endpoint)
        first, second = two_machines(tables, endpoint, way.address, join_seconds=10)
        tree = tree_of(second)
        way.cut = True
        assert second.wait() == EXIT_UNCONNECTED
        wait_for(lambda: not any(map(psutil.pid_exists, tree)))
        code = first.wait()
        store.kill()
    said = (tmp_path / "n1.log").read_text()
    assert code == EXIT_UNCONNECTED and "since n2 fell silent" in said, said
    error = "error: n1 has lost the other machines: n2 did not come back in 10 s, nor another"
    assert said.splitlines()[-1].startswith(error), said
    said = (tmp_path / "n2.log").read_text()
    error = "error: n2 has lost the other machines: their store has not answered for 6 s"
    assert said.splitlines()[-1] == error, said


@FULL
@needs_proc
@pytest.mark.skipif(not shared_memory.PLACE.is_dir(), reason="needs /dev/shm")
def test_the_machine_of_rank_0_is_replaced_and_the_run_goes_on_from_memory(tmp_path):
    write_text(tmp_path)
    steps = 100
    changes = {"checkpoint": {"interval": 1000, "memory_interval": 1}}
    straight, lost = (tables_of(tmp_path, name, steps, changes) for name in ("one", "other"))
    with free_endpoint() as endpoint, free_endpoint() as another:
        store, of_straight = start_store(endpoint), start_store(another)
        assert [each.wait() for each in two_machines(straight, another)] == [0, 0]
        of_straight.kill()
        machines = two_machines(lost, endpoint)
        first, second = machines
        if machine_of_first_rank(lost) == "n2":
            first, second = second, first
        tree = tree_of(first)
        signal_all(tree, signal.SIGKILL)
        third = machine(lost, "n3", endpoint)
        assert [each.wait() for each in (second, third)] == [0, 0]
        store.send_signal(signal.SIGTERM)
        assert store.wait() == 0
    said = "".join(file.read_text() for file in tmp_path.glob("n*.log"))
    assert re.search(r"continue  from step \d+: the copy in memory", said), said
    check_same_end(straight, lost, ranks=2, lines=steps + steps // 50)
