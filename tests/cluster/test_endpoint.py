"""The address and the interface by which this machine reaches another one."""

import contextlib
import os
import socket

import psutil
import pytest
from torch.distributed.elastic.rendezvous import RendezvousStateError

from torchmars.cluster import connection
from torchmars.cluster.endpoint import (
    find_store,
    interface_of,
    is_private,
    local_address,
)
from torchmars.cluster.environment import Environment, read_environment
from torchmars.cluster.rendezvous import Machines
from torchmars.cluster.scheduler import can_listen, job_port
from torchmars.cluster.sizes import MinMax, UsableSizes
from torchmars.core.errors import NotMet, UserError


def test_the_interface_of_an_address():
    for name, addresses in psutil.net_if_addrs().items():
        for each in addresses:
            if each.family == socket.AF_INET:
                assert interface_of(each.address) == name
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.77") is None  # kept for documentation: no machine's


def test_a_loopback_address_is_none_that_others_know():
    assert local_address("127.0.0.1", 80) == "127.0.0.1"
    private = ["127.0.0.1:80", "localhost:80", "[::1]:80"]
    assert [is_private(each) for each in [*private, "10.0.0.1:80", "a-name:80"]] == [True] * 3 + [
        False
    ] * 2


JOB = {"SLURM_JOB_ID": "7", "ENVIRONMENT": "BATCH"}


@pytest.fixture
def variables(monkeypatch):
    """Set variables of the environment, and none else that tells of a rendezvous."""
    for name in ("RDZV_ENDPOINT", "GLOO_SOCKET_IFNAME", *JOB):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RDZV_TIMEOUT", "1")
    return lambda values: [monkeypatch.setenv(*each) for each in values.items()]


@pytest.mark.parametrize("host", ["127.0.0.1", "203.0.113.77", "nowhere.invalid"])
@pytest.mark.parametrize("job", [{}, JOB])
def test_an_endpoint_that_cannot_be_is_a_line(variables, host, job):
    """In a job a port that is taken may be free at the next start."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        endpoint = f"{host}:{other.getsockname()[1]}"
        variables(job)
        with pytest.raises(UserError) as caught:
            find_store(endpoint, 0)
    said = str(caught.value)
    assert f"RDZV_ENDPOINT = {endpoint}" in said and "NNODES" not in said
    assert isinstance(caught.value, NotMet) == (bool(job) and host == "127.0.0.1")


@pytest.mark.skipif(not can_listen("::1", 0), reason="needs IPv6")
def test_an_endpoint_of_ipv6_is_written_as_in_urls(variables):
    variables({})
    with socket.socket(socket.AF_INET6) as opened:
        opened.bind(("::1", 0))
        port = opened.getsockname()[1]
    connect, holds, address = find_store(f"[::1]:{port}")
    store = connect()
    store.set("a", "b")
    other, held, _ = find_store(f"[::1]:{port}")
    assert (holds, held, address) == (True, False, "::1") and other().get("a") == b"b"


def test_the_port_of_a_job_is_the_next_that_is_free():
    """Whether what has it listens at one address or at all, as IPv4 or as both."""
    job = os.getpid() % 11_000  # another suite on this machine has other ports
    own = job_port(12_000 + job)
    assert own == job_port(job) >= 20_000 + job
    with contextlib.ExitStack() as opened:
        for family, address in (
            (socket.AF_INET, "127.0.0.1"),
            (socket.AF_INET, ""),
            (socket.AF_INET6, "::"),
        ):
            port, other = job_port(job), opened.enter_context(socket.socket(family))
            other.bind((address, port))
            other.listen()
            assert job_port(job) > port
    assert job_port(job) == own


def test_a_job_whose_number_is_high_has_a_port_below_those_that_systems_give_away():
    assert all(20_000 <= job_port(job) < 32_768 for job in (0, 11_999, 12_000, 2**31))


def test_a_token_of_any_bytes_signs_for_one_place_alone_and_no_error_repeats_it():
    token = os.fsdecode(b"\xff\xfe secret")
    assert read_environment({"RDZV_TOKEN": token}).RDZV_TOKEN == token
    sizes = UsableSizes(MinMax(1, 1), [1], 1, 1)
    machine = Machines("run", Environment(RDZV_TOKEN=token), sizes)
    sealed = machine._sealed("key", "text")
    assert machine._opened("key", sealed.encode()) == "text" and "secret" not in sealed
    for key, forged in (("other", sealed), ("key", sealed[:-1] + "u"), ("key", sealed[:40])):
        with pytest.raises(RendezvousStateError, match="not signed by"):
            machine._opened(key, forged.encode())
    machine.left = True


def test_a_process_that_goes_on_has_the_variables_that_it_had(monkeypatch):
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth0")
    connection.keep_within_machine()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo" and os.environ["NCCL_SOCKET_IFNAME"] == "eth0"
    connection.stop()
    assert "GLOO_SOCKET_IFNAME" not in os.environ and os.environ["NCCL_SOCKET_IFNAME"] == "eth0"
