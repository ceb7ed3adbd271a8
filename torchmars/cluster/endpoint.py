"""The endpoint of the rendezvous, and the address of this machine that others connect to."""

import contextlib
import ipaddress
import os
import socket
import time

import psutil

from torchmars.cluster import process
from torchmars.cluster.environment import split_endpoint
from torchmars.cluster.ports import can_listen
from torchmars.cluster.scheduler import JOB_ENDPOINT, in_batch_job
from torchmars.core.errors import NotMet, UserError


def find_endpoint(endpoint: str) -> tuple[str, bool | None, str | None]:
    """Return (endpoint, is_host, local address) for torchrun on this machine.

    It is one of several machines whose rendezvous is at `endpoint`, HOST:PORT. The function waits
    until the machine that HOST names listens. torchrun finds out the host and the local address
    from the machine's own name, which may stand for another address. So both are passed to it.
    Raises `UserError` if the machines cannot connect.
    """
    name, remedy = endpoint_in_words(endpoint)
    host, port = split_endpoint(endpoint, name.partition(" = ")[0])
    address = address_of(host, name, remedy)
    number, here = process.node_rank(), can_listen(address, 0)
    if number == 0 and not here:
        raise UserError(
            f"{name}: {host} is not {process.node()}, which is machine number 0: {remedy}"
        )
    free = can_listen("", port)
    if number == 0 and not free:
        raise taken(name, port)
    is_host = here and free if number is None else number == 0
    if not is_host:
        wait_for_host(name, host, port)
    local = local_address(address, port)
    if local is not None and (interface := interface_of(local)):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    if number is None and is_host:
        # Two launchers may start on this machine at once. The first one becomes the host, which
        # torchrun finds out by itself for an address that it knows to be local.
        return f"localhost:{port}", None, local
    return endpoint, is_host, local


def listen(endpoint: str, has_secret: bool) -> socket.socket:
    """Return a socket that listens at `endpoint`, HOST:PORT, of this machine, and nowhere else.

    A HOST that is this machine's own name may stand for a loopback address here, and for another
    one elsewhere: then it listens at all addresses. Raises `UserError` where it cannot listen, or
    others could reach it and there is no secret; `NotMet` in a job whose port is taken.
    """
    host, port = split_endpoint(endpoint, "ENDPOINT")
    name = f"the rendezvous {endpoint}"
    address = address_of(host, name, "name an address of this machine")
    private = ipaddress.ip_address(address).is_loopback
    if private and host not in (address, "localhost"):
        address, private = "", False
    if not (private or has_secret):
        raise UserError(
            f"whoever reaches {endpoint} could join the runs that meet there: set RDZV_TOKEN to "
            "the secret of their launchers"
        )
    if not can_listen(address, 0):
        raise UserError(f"{name}: {host} is not {process.node()}: name an address of this machine")
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, port), family=family, backlog=4096)
    except OSError:
        raise taken(name, port) from None


def address_of(host: str, name: str, remedy: str) -> str:
    """Return the address of `host`. Raises `UserError` with the `name` that users know it by."""
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise UserError(
            f"{name}: {process.node()} does not know {host} ({error.strerror}): {remedy}"
        ) from None


def taken(name: str, port: int) -> UserError:
    """Return the error of a port of this machine at which another program listens."""
    # A job that starts again finds another port, or the program gone that has this one.
    kind = NotMet if in_batch_job(os.environ) else UserError
    return kind(f"{name}: port {port} of {process.node()} is taken: choose another one")


def endpoint_in_words(endpoint: str) -> tuple[str, str]:
    """Return a user's name for an endpoint, and how to choose another host.

    It comes from run_train.sh, which found it out for a job, from the variable or from the option.
    """
    if os.environ.get(JOB_ENDPOINT) == endpoint:
        remedy = "set RDZV_ENDPOINT=HOST:PORT, HOST being an address of the job's first machine"
        return f"the job's own rendezvous {endpoint}", remedy
    source = "RDZV_ENDPOINT" if "RDZV_ENDPOINT" in os.environ else "--rdzv-endpoint"
    return (
        f"{source} = {endpoint}",
        "name one of the machines, the first one where they have numbers",
    )


def wait_for_host(name: str, host: str, port: int) -> None:
    """Wait until something listens at HOST:PORT, that users call `name`.

    Raises `UserError` if nothing does in time, `NotMet` in a job, which has the right machine.
    """
    deadline = time.monotonic() + process.start_timeout().total_seconds()
    while True:
        try:
            left = max(1.0, deadline - time.monotonic())
            socket.create_connection((host, port), timeout=left).close()
            return
        except OSError as error:
            if time.monotonic() > deadline - 1:
                raise (NotMet if process.may_meet_later() else UserError)(
                    f"nobody is at {name}, as seen from {process.node()} "
                    f"({error.strerror or error}): run the same command on the machine that it "
                    "names, and see that this one can reach it"
                ) from None
            time.sleep(0.5)


def answers(endpoint: str) -> bool:
    """Return whether something listens at HOST:PORT."""
    with contextlib.suppress(OSError):
        socket.create_connection(split_endpoint(endpoint), timeout=10).close()
        return True
    return False


def local_address(address: str, port: int) -> str | None:
    """Return the address of this machine from which it reaches another one.

    None if there is no route, or where it is a loopback address, which no other machine knows.
    """
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, port))  # sends nothing: the system only chooses a route
        local = str(probe.getsockname()[0])
        return None if local.startswith("127.") else local
    return None


def interface_of(address: str) -> str | None:
    """Return the name of the network interface with an address; None if no interface has it."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address == address for each in addresses):
            return name
    return None
