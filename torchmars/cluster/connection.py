"""Connects the ranks: first the store of the rendezvous, then the process group of all of them."""

import contextlib
import os
import re
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist

from torchmars.cluster import process
from torchmars.cluster.endpoint import interface_of
from torchmars.config import ParallelismConfig
from torchmars.core.device import COLLECTIVES, MAKERS, backend_of, gpu_type, use
from torchmars.core.errors import (
    EXIT_MISTAKE,
    EXIT_UNCONNECTED,
    LostRank,
    NoTraffic,
    UserError,
    end_at_once,
    report_failure,
)
from torchmars.core.timers import unless_done_in
from torchmars.parallel.layout import Layout

# The errors of a connection whose other end has died.
CLOSED = re.compile("closed by peer|reset by peer|broken pipe|likely closed", re.IGNORECASE)
NETWORK = re.compile(rf"{COLLECTIVES}|socket|connect|timed out", re.IGNORECASE)
# Errors that no waiting mends: a wrong interface, or no way to the other machine.
NO_ROUTE = re.compile("no route|unreachable|unable to find|no socket interface", re.IGNORECASE)

OWN: dict[str, str] = {}  # variables of the network that this process has set for itself


def open_store() -> dist.Store:
    """Open the store of all ranks: a file on one machine, otherwise hosted by rank 0.

    A process that was started alone has one of its own. Raises `UserError` if the file cannot be
    shared, `LostRank` if rank 0 cannot be reached.
    """
    if "RANK" not in os.environ:
        return dist.HashStore()
    if file := os.environ.get(process.STORE_FILE):
        try:
            store = dist.FileStore(file)
            store.set_timeout(process.start_timeout())
            store.add("opened", 1)  # it locks the file
            return store
        except RuntimeError as error:
            raise UserError(
                f"the ranks cannot share {file} ({str(error).splitlines()[0]}): set TMPDIR to a "
                "folder of this machine's own disk"
            ) from None
    try:
        return next(dist.rendezvous("env://", timeout=process.start_timeout()))[0]
    except RuntimeError as error:  # DistNetworkError, DistStoreError
        place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise LostRank(
            f"rank {process.rank()} on {process.node()} cannot reach rank 0 at {place} "
            f"({str(error).splitlines()[0]}): see what that one says, and whether "
            "the machines may reach each other on any port"
        ) from None


def start(config: ParallelismConfig, store: dist.Store | None = None) -> Layout:
    """Make the process group of all ranks, and return the layout.

    It checks that the network between the ranks carries data. `store` comes from `open_store`.
    Raises `UserError` if the degrees do not make the number of ranks.
    """
    size = process.world_size()
    degrees = config.degrees(size)
    process.allow_open_files()
    if process.alone_on_machine():
        keep_within_machine()
    device, backend = torch.device("cpu"), "gloo"
    if gpu := gpu_type():
        device = torch.device(gpu, process.local_rank())
        backend = f"cpu:gloo,{gpu}:{backend_of(gpu)}"
        use(device)
        # Of every group gloo would connect all ranks with each other, and NCCL carries the data.
        # Where gloo carries them, the death of a rank shows at once on connections that are there.
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    # Collectives that torch's flight recorder keeps, for the watchdog to name.
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    if dist.is_initialized():
        return Layout.create(device, degrees)
    with _network_check():
        # NCCL's own 10 minutes would forestall the watchdog.
        store = store or open_store()
        dist.init_process_group(
            backend,
            store=store,
            rank=process.rank(),
            world_size=size,
            timeout=timedelta(minutes=30),
        )
        for place in dict.fromkeys((torch.device("cpu"), device)):
            ones = torch.ones(1, device=place)
            dist.all_reduce(ones)
            assert ones.item() == size
        store.set_timeout(timedelta(minutes=30))  # groups that are made later use it too
        return Layout.create(device, degrees)


def keep_within_machine() -> None:
    """Keep the ports of this process out of other machines' reach.

    A user who names an interface keeps it.
    """
    if loopback := interface_of("127.0.0.1"):
        named = {"GLOO_SOCKET_IFNAME": loopback}
        for maker in MAKERS.values():
            named |= {name: value.format(loopback) for name, value in maker.interface.items()}
        OWN.update({name: value for name, value in named.items() if name not in os.environ})
        os.environ.update(OWN)


@contextlib.contextmanager
def _network_check() -> Iterator[None]:
    """End the process with one line where the body fails or hangs.

    The body is the first traffic between ranks, which has no time limit of its own. The exit code
    tells a mistake from an error that may pass at the next try.
    """

    def problem(reason: str) -> str:
        return (
            f"{process.node()}: the ranks are connected, but cannot exchange data ({reason}): "
            "set GLOO_SOCKET_IFNAME, for GPUs NCCL_SOCKET_IFNAME too, to the network interface "
            "that connects the machines, see that no firewall is between them, or give slow "
            "machines more time by RDZV_TIMEOUT"
        )

    def give_up(reason: str, code: int = EXIT_UNCONNECTED) -> None:
        report_failure(NoTraffic(problem(reason)))
        # The launcher ends the others, and asks whether a rank elsewhere has died.
        end_at_once(code)

    seconds = process.start_timeout().total_seconds()
    try:
        with unless_done_in(seconds, lambda: give_up(f"nothing has come in {seconds:g} s")):
            yield
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        if CLOSED.search(reason):
            raise LostRank(
                f"rank {process.rank()} on {process.node()} lost another rank at the start: "
                f"{reason}"
            ) from None
        if not NETWORK.search(reason):
            raise
        if "RANK" not in os.environ:  # no launcher has others to end: a program may go on
            raise UserError(problem(reason)) from None
        give_up(reason, EXIT_MISTAKE if NO_ROUTE.search(str(error)) else EXIT_UNCONNECTED)


def stop() -> None:
    """Leave the process group, if there is one, and undo its settings."""
    if dist.is_initialized():
        dist.destroy_process_group()
    for name in OWN:  # a program that goes on may submit a job of several machines
        os.environ.pop(name, None)
    OWN.clear()
