"""The one authority for ranks: device, backend, process groups and the mesh of a run."""

import contextlib
import os
import re
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from torchmars.config import ParallelismConfig
from torchmars.console import say
from torchmars.environment import read_variable
from torchmars.errors import EXIT_MISTAKE, LostRank, NoTraffic, UserError, report_failure

T = TypeVar("T")
CLOSED = re.compile(
    "closed by peer|reset by peer|broken pipe|likely closed", re.IGNORECASE
)  # what becomes of a connection whose other end has died
NETWORK = re.compile("gloo|nccl|socket|connect|timed out", re.IGNORECASE)


def rank() -> int:
    """This process's number among all ranks, 0 when it was started alone. Known before `start`."""
    return int(os.environ.get("RANK", 0))


def world_size() -> int:
    """The number of ranks, 1 for a process that was started alone."""
    return int(os.environ.get("WORLD_SIZE", 1))


def local_rank() -> int:
    """This process's number among those of its machine, 0 when it was started alone."""
    return int(os.environ.get("LOCAL_RANK", 0))


def node() -> str:
    """What this machine is called."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def node_rank() -> int | None:
    """The number that this machine was given among several; None where they are to find out."""
    number = os.environ.get("NODE_RANK")
    return None if number is None else read_variable("NODE_RANK", number)


@dataclass
class Layout:
    """This rank's place: its device, the mesh of the data-parallel ranks and how many there are."""

    device: torch.device
    mesh: DeviceMesh
    rank: int
    size: int
    control: dist.ProcessGroup
    """CPU group for messages between ranks; it waits for days, since one rank may prepare data that long."""

    @property
    def first(self) -> bool:
        """Whether this is the rank that talks and writes."""
        return self.rank == 0

    def agree(self, work: Callable[[], T]) -> list[T]:
        """Run `work` on every rank and return all ranks' results. An exception on one rank ends all: a `UserError` is raised on
        every rank, another one where it happened, and as a RuntimeError on the others.
        """
        mine, failure, told = None, None, None
        try:
            mine = work()
        except Exception as error:
            failure = told = error
            if not isinstance(error, UserError):
                told = RuntimeError(f"rank {self.rank}: {error!r}")
        everyone: list[tuple[T | None, Exception | None]] = [(None, None)] * self.size
        dist.all_gather_object(everyone, (mine, told), group=self.control)
        if failure is not None:
            raise failure
        for _, error in everyone:
            if error is not None:
                raise error
        return [result for result, _ in everyone]

    def on_first(self, work: Callable[[], T]) -> T:
        """Run `work` on the first rank while the others wait; its result, or its `UserError`, on every rank."""
        return self.agree(lambda: work() if self.first else None)[0]

    def say(self, text: str) -> None:
        """Print a line, on the first rank only."""
        if self.first:
            say(text)

    def any(self, *flags: bool) -> list[bool]:
        """For each flag, whether it is set on any rank."""
        values = torch.tensor(flags, dtype=torch.uint8)
        dist.all_reduce(values, dist.ReduceOp.MAX, group=self.control)
        return values.bool().tolist()

    def aside(self) -> "Layout":
        """The same ranks with a control group of their own, for a thread beside the training. Collective."""
        return replace(self, control=control_group())

    def mean(self, value: torch.Tensor) -> float:
        """The mean over the ranks of a scalar tensor. Waits for the device."""
        value = value.detach().clone()
        dist.all_reduce(value)
        return value.item() / self.size

    def describe(self) -> str:
        """The layout in words, for the console."""
        backend = "nccl" if self.device.type == "cuda" else "gloo"
        ranks = "1 rank" if self.size == 1 else f"{self.size} ranks"
        if self.mesh.ndim == 2:
            return f"HSDP {self.mesh.size(0)} x {self.mesh.size(1)} over {ranks} ({self.device.type}, {backend})"
        return f"FSDP over {ranks} ({self.device.type}, {backend})"


def check_devices(local_ranks: int | None = None) -> None:
    """Raise `UserError` where this machine has GPUs, but fewer than ranks (by default those that torchrun started here)."""
    local_ranks = local_ranks or int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    gpus = torch.cuda.device_count()
    if 0 < gpus < local_ranks:
        raise UserError(
            f"{local_ranks} ranks need as many GPUs, {node()} has {gpus}: set NGPU to at most {gpus}"
        )


def patience() -> timedelta:
    """How long ranks wait for each other at the start."""
    return timedelta(seconds=read_variable("RDZV_TIMEOUT", os.environ.get("RDZV_TIMEOUT", "45")))


def meet() -> dist.Store:
    """A store of words between the ranks that torchrun announced, or of a process that was started alone. Rank 0 keeps it.

    Raises `LostRank` where rank 0 cannot be reached.
    """
    if "RANK" not in os.environ:
        return dist.HashStore()
    try:
        return next(dist.rendezvous("env://", timeout=patience()))[0]
    except RuntimeError as error:  # DistNetworkError, DistStoreError
        place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise LostRank(
            f"rank {rank()} on {node()} cannot reach rank 0 at {place} ({str(error).splitlines()[0]}): see what that one says, and whether "
            "the machines may reach each other on any port"
        ) from None


def start(config: ParallelismConfig, store: dist.Store | None = None) -> Layout:
    """Make the process group of all ranks, see that their network carries data, and lay out the mesh.

    `store` is what `meet` gave. Raises `UserError` where the degrees do not make the number of ranks.
    """
    size = world_size()
    replicate, shard = config.degrees(size)
    if torch.cuda.is_available():
        device, backend = torch.device("cuda", local_rank()), "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(device)
    else:
        device, backend = torch.device("cpu"), "gloo"
    os.environ.setdefault(
        "TORCH_FR_BUFFER_SIZE", "2000"
    )  # collectives that torch's flight recorder keeps, for the watchdog to name
    if not dist.is_initialized():
        with _network_check():
            # NCCL's own 10 minutes would forestall the watchdog.
            store = store or meet()
            dist.init_process_group(
                backend, store=store, rank=rank(), world_size=size, timeout=timedelta(minutes=30)
            )
            for place in dict.fromkeys((torch.device("cpu"), device)):
                ones = torch.ones(1, device=place)
                dist.all_reduce(ones)
                assert ones.item() == size
        store.set_timeout(timedelta(minutes=30))  # groups that are made later meet there
    return Layout(device, _mesh(device.type, replicate, shard), rank(), size, control_group())


@contextlib.contextmanager
def _network_check() -> Iterator[None]:
    """End the process with one line where the body, the first traffic between the ranks, fails or takes too long: it has no time limit of its own."""

    def give_up(reason: str) -> None:
        report_failure(
            NoTraffic(
                f"{node()}: the ranks have met, but cannot exchange data ({reason}): "
                "set GLOO_SOCKET_IFNAME, for GPUs NCCL_SOCKET_IFNAME too, to the network interface "
                "that connects the machines, and see that no firewall is between them"
            )
        )
        # The launcher ends the others, and asks whether a rank elsewhere has died.
        os._exit(EXIT_MISTAKE)

    late = threading.Timer(
        patience().total_seconds(),
        give_up,
        [f"nothing has come in {patience().total_seconds():g} s"],
    )
    late.daemon = True
    late.start()
    try:
        yield
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        if CLOSED.search(reason):
            raise LostRank(
                f"rank {rank()} on {node()} lost another rank at the start: {reason}"
            ) from None
        if not NETWORK.search(reason):
            raise
        give_up(reason)
    finally:
        late.cancel()


def simulate(config: ParallelismConfig, world_size: int, rank: int, device: torch.device) -> Layout:
    """The layout of one of `world_size` ranks that do not exist. Their collectives, torch's fake ones, return at once and change nothing.

    Once in a process. The mesh is of CPUs; `device` is only what the layout calls itself. Raises `UserError` as `start`.
    """
    replicate, shard = config.degrees(world_size)
    dist.init_process_group("fake", rank=rank, world_size=world_size)
    return Layout(device, _mesh("cpu", replicate, shard), rank, world_size, dist.group.WORLD)


def _mesh(device: str, replicate: int, shard: int) -> DeviceMesh:
    if replicate > 1:
        return init_device_mesh(
            device, (replicate, shard), mesh_dim_names=("dp_replicate", "dp_shard")
        )
    return init_device_mesh(device, (shard,), mesh_dim_names=("dp_shard",))


def control_group() -> dist.ProcessGroup:
    """A new CPU group over all ranks."""
    return dist.new_group(backend="gloo", timeout=timedelta(days=7))


def stop() -> None:
    """Leave the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()
