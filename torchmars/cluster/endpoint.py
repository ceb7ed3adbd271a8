"""Where the machines meet, who listens there, and the address of this machine for the others."""

import contextlib
import ipaddress
import os
import socket
from collections.abc import Callable
from datetime import timedelta
from functools import partial

import psutil
from torch.distributed import TCPStore

from torchmars.cluster import process
from torchmars.cluster.environment import split_endpoint
from torchmars.core.errors import UserError

ANSWER = timedelta(seconds=30)  # a store's: on a busy machine a connection takes seconds


def find_store(
    endpoint: str, number: int | None = None
) -> tuple[Callable[[], TCPStore], bool, str]:
    """Return how to open the store at `endpoint`, whether this machine holds it, and its address.

    It holds it if HOST is an address of its own at which nobody listens yet, or if its `number` is
    0. Raises `UserError` if it cannot.
    """
    name = f"RDZV_ENDPOINT = {endpoint}"
    host, port = split_endpoint(endpoint)
    address, listener = address_of(host, name), None
    if number in (0, None):
        try:
            listener = listen(endpoint, name)
        except UserError:
            if number == 0:
                raise
    local = local_address(address, port)
    if not is_loopback(local) and (interface := interface_of(local)):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    if is_loopback(local) and not is_loopback(host):
        local = socket.getfqdn()  # the others know this machine by its name
    return partial(open_meeting, address, port, listener), listener is not None, local


def open_meeting(address: str, port: int, listener: socket.socket | None = None) -> TCPStore:
    """Open the store at an address, which this process holds where it is the one that listens."""
    number = None if listener is None else listener.detach()
    holds = number is not None
    return TCPStore(address, port, None, holds, ANSWER, False, master_listen_fd=number)


def listen(endpoint: str, name: str) -> socket.socket:
    """Return a socket that listens at `endpoint`, HOST:PORT, of this machine, and nowhere else.

    Users know it by `name`. A HOST that is this machine's own name may stand for a loopback address
    here, and for another one elsewhere: then it listens at all. Raises `UserError` if it cannot.
    """
    host, port = split_endpoint(endpoint)
    address = address_of(host, name)
    if is_loopback(address) and not is_loopback(host):
        address = ""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, port), family=family, backlog=4096)
    except OSError as error:
        raise UserError(
            f"{name}: {process.node()} cannot listen there ({error.strerror}): name an address of "
            "this machine, and a port that is free"
        ) from None


def is_loopback(host: str) -> bool:
    """Return whether a host is a loopback address, which no other machine has."""
    with contextlib.suppress(ValueError):
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    return False


def address_of(host: str, name: str) -> str:
    """Return the address of `host`. Raises `UserError` with the `name` that users know it by."""
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except (OSError, UnicodeError) as error:
        raise UserError(
            f"{name}: {process.node()} finds no address of {host} ({error}): set RDZV_ENDPOINT to "
            "an address of one machine, the first one where they have numbers"
        ) from None


def local_address(address: str, port: int) -> str:
    """Return the address of this machine from which it reaches another one, or else that one."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((address, port))  # sends nothing: the system only chooses a route
        return str(probe.getsockname()[0])
    return address


def interface_of(address: str) -> str | None:
    """Return the name of the network interface with an address; None if no interface has it."""
    found = psutil.net_if_addrs().items()
    return next((name for name, all in found if address in [each.address for each in all]), None)


def free_port() -> int:
    """Return a port of this machine that is free now."""
    with socket.create_server(("", 0)) as probe:
        return int(probe.getsockname()[1])
