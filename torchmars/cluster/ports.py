"""Ports of this machine at which nothing listens."""

import socket

FIRST, COUNT = 20_000, 12_000  # below those that systems give away


def can_listen(address: str, port: int) -> bool:
    """Return whether this machine has an address, and nothing listens on a port of it."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError:
            return False
    return True


def job_port(job: int) -> int:
    """Return the port at which the machines of a job meet: its own, or the next that is free.

    Without any it is the job's own, of which its first machine says that it is taken.
    """
    own = [FIRST + (job + more) % COUNT for more in range(COUNT)]
    return next((port for port in own if can_listen("", port)), own[0])
