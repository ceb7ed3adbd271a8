"""The address and the interface by which this machine reaches another one."""

import os
import socket

import psutil
import pytest
from torch.distributed.elastic.rendezvous import RendezvousStateError

from torchmars.cluster import connection
from torchmars.cluster.endpoint import (
    find_store,
    interface_of,
    is_loopback,
    local_address,
)
from torchmars.cluster.environment import Environment, read_environment
from torchmars.cluster.rendezvous import Machines
from torchmars.cluster.sizes import MinMax, UsableSizes
from torchmars.core.errors import UserError


def test_the_interface_of_an_address():
    for name, addresses in psutil.net_if_addrs().items():
        for each in addresses:
            if each.family == socket.AF_INET:
                assert interface_of(each.address) == name
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.77") is None  # kept for documentation: no machine's


def test_a_loopback_address_is_none_that_others_know():
    assert local_address("127.0.0.1", 80) == "127.0.0.1"
    private = ["127.0.0.1", "localhost", "::1"]
    assert [is_loopback(each) for each in [*private, "10.0.0.1", "a-name"]] == [True] * 3 + [
        False
    ] * 2


@pytest.fixture
def variables(monkeypatch):
    """Set variables of the environment, and none else that tells of a rendezvous."""
    for name in ("RDZV_ENDPOINT", "GLOO_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RDZV_TIMEOUT", "1")
    return lambda values: [monkeypatch.setenv(*each) for each in values.items()]


@pytest.mark.parametrize("host", ["127.0.0.1", "203.0.113.77", "nowhere.invalid"])
def test_an_endpoint_that_cannot_be_is_a_line(variables, host):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        endpoint = f"{host}:{other.getsockname()[1]}"
        variables({})
        with pytest.raises(UserError) as caught:
            find_store(endpoint, 0)
    said = str(caught.value)
    assert f"RDZV_ENDPOINT = {endpoint}" in said and "NNODES" not in said


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="needs IPv6")
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
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth0")
    connection.keep_within_machine()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo" and os.environ["NCCL_SOCKET_IFNAME"] == "eth0"
    connection.stop()
    assert "GLOO_SOCKET_IFNAME" not in os.environ and os.environ["NCCL_SOCKET_IFNAME"] == "eth0"
