"""The address and the interface by which this machine reaches another one."""

import contextlib
import os
import socket

import psutil
import pytest

from tests.support.machines import free_endpoint
from torchmars.cluster import connection, process
from torchmars.cluster.endpoint import find_endpoint, interface_of, local_address
from torchmars.cluster.environment import read_environment
from torchmars.cluster.ports import job_port
from torchmars.cluster.rendezvous import Checked
from torchmars.cluster.scheduler import JOB_ENDPOINT
from torchmars.core.errors import NotMet, UserError


def test_the_interface_of_an_address():
    for name, addresses in psutil.net_if_addrs().items():
        for each in addresses:
            if each.family == socket.AF_INET:
                assert interface_of(each.address) == name
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.77") is None  # kept for documentation: no machine's


def test_a_loopback_address_is_none_that_others_know():
    assert local_address("127.0.0.1", 80) is None


JOB = {"SLURM_JOB_ID": "7", "ENVIRONMENT": "BATCH"}


@pytest.fixture
def variables(monkeypatch):
    """Set variables of the environment, and none else that tells of a rendezvous."""
    for name in ("RDZV_ENDPOINT", JOB_ENDPOINT, "NODE_RANK", "GLOO_SOCKET_IFNAME", *JOB):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RDZV_TIMEOUT", "1")
    return lambda values: [monkeypatch.setenv(*each) for each in values.items()]


@pytest.mark.parametrize("number", ["0", "1"])
@pytest.mark.parametrize("host", ["127.0.0.1", "203.0.113.77", "nowhere.invalid"])
@pytest.mark.parametrize(
    "source,named",
    [
        ("RDZV_ENDPOINT", "RDZV_ENDPOINT = {}"),
        (JOB_ENDPOINT, "the job's own rendezvous {}"),
        ("", "--rdzv-endpoint = {}"),
    ],
)
def test_an_error_names_where_the_endpoint_comes_from(variables, number, host, source, named):
    """And what nobody has set is not blamed."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))  # nobody listens there
        endpoint = f"{host}:{other.getsockname()[1]}"
        if number == "0":
            other.listen()
        variables({"NODE_RANK": number})
        if source == JOB_ENDPOINT:
            variables({JOB_ENDPOINT: endpoint, "RDZV_ENDPOINT": endpoint, **JOB})
        elif source:
            variables({source: endpoint})
        with pytest.raises(UserError) as caught:
            find_endpoint(endpoint)
    said = str(caught.value)
    assert named.format(endpoint) in said and "NODE_RANK" not in said and "NNODES" not in said
    assert source == "RDZV_ENDPOINT" or "RDZV_ENDPOINT" not in said.partition(": ")[0]
    again = source == JOB_ENDPOINT and (number == "1" or host == "127.0.0.1")
    assert isinstance(caught.value, NotMet) == (again and host != "nowhere.invalid")


def test_a_machine_of_an_elastic_run_that_finds_nobody_may_be_started_again(variables):
    with free_endpoint() as endpoint:
        variables({"NODE_RANK": "1", "RDZV_ENDPOINT": endpoint, process.FEWEST: "8"})
        with pytest.raises(NotMet, match="nobody is at RDZV_ENDPOINT"):
            find_endpoint(endpoint)


def test_the_port_of_a_job_is_the_next_that_is_free():
    """Whether what has it listens at one address or at all, as IPv4 or as both."""
    own = job_port(12_007)
    assert own == job_port(7) >= 20_007
    with contextlib.ExitStack() as opened:
        for family, address in (
            (socket.AF_INET, "127.0.0.1"),
            (socket.AF_INET, ""),
            (socket.AF_INET6, "::"),
        ):
            port, other = job_port(7), opened.enter_context(socket.socket(family))
            other.bind((address, port))
            other.listen()
            assert job_port(7) > port
    assert job_port(7) == own


def test_a_job_whose_number_is_high_has_a_port_below_those_that_systems_give_away():
    assert all(20_000 <= job_port(job) < 32_768 for job in (0, 11_999, 12_000, 2**31))


def test_a_token_of_any_bytes_signs_and_no_error_repeats_it():
    token = os.fsdecode(b"\xff\xfe secret")
    assert read_environment({"RDZV_TOKEN": token}).RDZV_TOKEN == token
    state = Checked(None, "run", token).signed(b"state")
    assert Checked(None, "run", token).signed(b"state") == state and b"secret" not in state


def test_a_process_that_goes_on_has_the_variables_that_it_had(monkeypatch):
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth0")
    connection.keep_within_machine()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo" and os.environ["NCCL_SOCKET_IFNAME"] == "eth0"
    connection.stop()
    assert "GLOO_SOCKET_IFNAME" not in os.environ and os.environ["NCCL_SOCKET_IFNAME"] == "eth0"
