"""The place where machines meet, and the network address under which they find each other there."""

import contextlib
import fcntl
import os
import socket
import struct
import time

from torchmars.cluster import process
from torchmars.cluster.environment import split_endpoint
from torchmars.core.errors import UserError

SIOCGIFADDR = 0x8915  # of Linux: the address of an interface


def find_endpoint(endpoint: str) -> tuple[str, bool | None, str | None]:
    """(endpoint, is_host, local address) for torchrun on this machine, one of several that meet at `endpoint`, HOST:PORT.

    Waits until the machine that HOST names is there. Torchrun would not tell this machine by an address that its own name does not stand
    for, and would let the others look for it under that name. Raises `UserError` where they cannot meet.
    """
    host, port = split_endpoint(endpoint)
    try:
        address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0]
    except OSError as error:
        raise UserError(
            f"RDZV_ENDPOINT = {endpoint}: {process.node()} does not know {host} ({error.strerror}): name one of the machines"
        ) from None
    number, here = process.node_rank(), is_here(address)
    if number == 0 and not here:
        raise UserError(
            f"RDZV_ENDPOINT = {endpoint}: {host} is not {process.node()}, whose NODE_RANK is 0: name that machine"
        )
    if number == 0 and not is_free(port):
        raise UserError(
            f"RDZV_ENDPOINT = {endpoint}: port {port} of {process.node()} is taken: choose another one"
        )
    if not (here if number is None else number == 0):
        wait_for_host(endpoint, host, port)
    way = way_to(address, port)
    if (
        number is None and here
    ):  # there may be two on this machine: torchrun makes the first one the host, where it knows the address for its own
        return f"localhost:{port}", None, way
    return endpoint, number == 0, way


def is_here(address: str) -> bool:
    """Whether an address is this machine's."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def is_free(port: int) -> bool:
    """Whether nothing listens on a port of this machine."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def wait_for_host(endpoint: str, host: str, port: int) -> None:
    """Wait until something listens at `endpoint`. Raises `UserError` where nothing does in time."""
    deadline = time.monotonic() + process.start_timeout().total_seconds()
    while True:
        try:
            return socket.create_connection(
                (host, port), timeout=max(1.0, deadline - time.monotonic())
            ).close()
        except OSError as error:
            if time.monotonic() > deadline - 1:
                raise UserError(
                    f"nobody is at RDZV_ENDPOINT = {endpoint}, as seen from {process.node()} ({error.strerror or error}): run the same command on the "
                    "machine that it names, and see that this one can reach it"
                ) from None
            time.sleep(0.5)


def way_to(address: str, port: int) -> str | None:
    """This machine's address on the way to another one; gloo is told to use its interface, unless it was told another.

    None where the way is not known, or leads to this machine itself by an address that no other knows.
    """
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, port))  # sends nothing: it only chooses the way
        mine = probe.getsockname()[0]
        if not mine.startswith("127."):
            if name := interface_of(mine):
                os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            return mine
    return None


def interface_of(address: str) -> str | None:
    """The name of the interface that has an IPv4 address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                if (
                    socket.inet_ntoa(
                        fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))[
                            20:24
                        ]
                    )
                    == address
                ):
                    return name
    return None
