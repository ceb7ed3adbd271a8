"""The one authority for axes: which ranks share which part of the work."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from torchmars.config import Degrees
from torchmars.core.console import say
from torchmars.core.errors import UserError
from torchmars.core.words import counted
from torchmars.parallel.groups import (
    OTHER_AXES,
    RankGroup,
    make_control_group,
    make_groups,
    make_meshes,
)

T = TypeVar("T")


@dataclass(frozen=True)
class FlagExchange:
    """Flags that all ranks exchange in the background; `Layout.exchange_flags` begins it."""

    flags: torch.Tensor
    work: dist.Work

    def result(self) -> list[bool]:
        """Return for each flag whether it is set on any rank. Waits until all ranks have begun."""
        self.work.wait()
        return self.flags.bool().tolist()


@dataclass(frozen=True)
class Layout:
    """The place of this rank: its device, and its groups along the axes of the mesh."""

    device: torch.device
    weight_mesh: DeviceMesh
    """All ranks, with the axes `WEIGHT_AXES`."""
    expert_mesh: DeviceMesh | None
    """All ranks, with the axes `EXPERT_MESH_AXES`; None if ep = 1."""
    groups: dict[str, RankGroup]
    """By the name of an axis, of a set of axes in `JOINT_AXES`, or "ep"."""
    control: dist.ProcessGroup
    """CPU group of all ranks for messages. It waits for days: rank 0 may prepare data that long."""

    @classmethod
    def create(cls, device: torch.device, degrees: Degrees) -> "Layout":
        """Lay out the ranks of the default process group. Collective."""
        mesh, weights, experts = make_meshes(device.type, degrees)
        groups = make_groups(mesh, experts)
        return cls(device, weights, experts, groups, make_control_group())

    def group(self, name: str) -> RankGroup:
        """Return the group of this rank along an axis, a set of axes in `JOINT_AXES`, or "ep"."""
        return self.groups[name]

    @property
    def world(self) -> RankGroup:
        """All ranks."""
        return self.groups["world"]

    @property
    def data(self) -> RankGroup:
        """The ranks that read different samples."""
        return self.groups["data"]

    @property
    def first(self) -> bool:
        """Whether this is the rank that prints and writes for all."""
        return self.world.rank == 0

    @property
    def shard_mesh(self) -> DeviceMesh:
        """The mesh that FSDP shards over: one axis, or with replicas two (HSDP)."""
        return self._with_replicas(self.weight_mesh, "fsdp")

    @property
    def expert_shard_mesh(self) -> DeviceMesh:
        """The mesh that FSDP shards experts over, likewise, where ep > 1."""
        assert self.expert_mesh is not None
        return self._with_replicas(self.expert_mesh, "expert_fsdp")

    def _with_replicas(self, mesh: DeviceMesh, axis: str) -> DeviceMesh:
        replicas = self.group("dp_replicate").size > 1
        return mesh["dp_replicate", axis] if replicas else mesh[axis]

    @property
    def norm_group(self) -> dist.ProcessGroup | None:
        """The ranks that hold different layers; None if every rank has a part of each layer."""
        stages = self.group("pp")
        return stages.process_group if stages.size > 1 else None

    def on_all(self, work: Callable[[], T]) -> T:
        """Run `work` on every rank, wait until all have done so, and return this rank's result.

        A `UserError` of one rank is raised on every rank. Any other exception is raised again on
        the rank that had it; the other ranks raise a RuntimeError. Where all goes well, the ranks
        exchange one number: anything more would grow with their number.
        """
        failure: Exception | None = None
        result: T | None = None
        try:
            result = work()
        except Exception as error:
            failure = error
        rank, size = self.world.rank, self.world.size
        failed = torch.tensor(size if failure is None else rank)
        dist.all_reduce(failed, dist.ReduceOp.MIN, group=self.control)
        if (first := int(failed)) == size:
            return cast(T, result)
        told: Exception = RuntimeError(f"rank {rank}: {failure!r}")
        told = self.broadcast(failure if isinstance(failure, UserError) else told, first)
        raise failure or told

    def on_first(self, work: Callable[[], T]) -> T:
        """Run `work` on the first rank; return its result, or raise its error, on every rank."""
        return self.broadcast(cast(T, self.only_first(work)), 0)

    def only_first(self, work: Callable[[], T]) -> T | None:
        """Run `work` on the first rank, which alone gets its result; raise its error on all."""
        return self.on_all(lambda: work() if self.first else None)

    def gather(self, work: Callable[[], T]) -> list[T]:
        """Run `work` on every rank; return the results of all on the first rank, none elsewhere.

        Errors are raised as in `on_all`.
        """
        result = self.on_all(work)
        found: list[T] = [result] * self.world.size if self.first else []
        dist.gather_object(result, found or None, group=self.control, group_dst=0)
        return found

    def agree(self, able: Callable[[], bool]) -> bool:
        """Return whether `able` is true on every rank. Errors are raised as in `on_all`."""
        return not self.exchange_flags(not self.on_all(able)).result()[0]

    def broadcast(self, value: T, rank: int) -> T:
        """Return the `value` of a rank on every rank."""
        values = [value]
        dist.broadcast_object_list(values, group=self.control, group_src=rank)
        return values[0]

    def send(self, value: Any, rank: int) -> None:
        """Send a picklable value to a rank, which calls `receive`."""
        dist.send_object_list([value], dst=rank, group=self.control)

    def receive(self, rank: int) -> Any:
        """Return the object that a rank sends."""
        values = [None]
        dist.recv_object_list(values, src=rank, group=self.control)
        return values[0]

    def machines(self, local_rank: int) -> list[list[int]]:
        """Return the ranks of each machine, in their order. Called by every rank.

        `local_rank` is the number of this rank on its machine.
        """
        first = torch.tensor(self.world.rank - local_rank)
        firsts = [torch.empty_like(first) for _ in range(self.world.size)]
        dist.all_gather(firsts, first, group=self.control)
        ranks: dict[int, list[int]] = {}
        for rank, each in enumerate(firsts):
            ranks.setdefault(int(each), []).append(rank)
        return list(ranks.values())

    def say(self, *lines: str) -> None:
        """Print lines, on the first rank only."""
        if self.first:
            say(*lines)

    def exchange_flags(self, *flags: bool) -> "FlagExchange":
        """Begin to ask all ranks which flags are set on any of them. Waits for nobody."""
        values = torch.tensor(flags, dtype=torch.uint8)
        work = dist.all_reduce(values, dist.ReduceOp.MAX, group=self.control, async_op=True)
        return FlagExchange(values, work)

    def with_own_control_group(self) -> "Layout":
        """Return the same layout with its own control group, for another thread. Collective."""
        return replace(self, control=make_control_group())

    @property
    def loss_parts(self) -> int:
        """How many ranks compute different parts of the loss."""
        return self.group("loss").size // self.group("pp").size

    def add_up_losses(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of `values` over the ranks that compute different parts of the loss.

        In a pipeline the last stage has them, and the others give 0.
        """
        values = values.detach().clone()
        dist.all_reduce(values, group=self.group("loss").process_group)
        return values

    def mean_loss(self, value: torch.Tensor) -> float:
        """Return the mean of a scalar over these ranks. Waits for the device."""
        return self.add_up_losses(value).item() / self.loss_parts

    @property
    def degrees(self) -> Degrees:
        """The sizes of all axes."""
        return Degrees(*(self.group(axis).size for axis in Degrees._fields))

    def describe(self) -> str:
        """Return the layout in words, for the console."""
        return describe_layout(self.degrees, self.device.type)


def describe_layout(degrees: Degrees, device: str) -> str:
    """Return a layout in words, of ranks that compute on devices of type `device`."""
    size = math.prod(degrees[:-1])
    backend = dist.get_default_backend_for_device(device)
    ranks = f"{counted(size, 'rank')} ({device}, {backend})"
    if degrees.ep > 1:
        ranks += f", EP {degrees.ep}"
    if size == 1:
        return ranks
    if size == degrees.dp_shard:
        return f"FSDP over {ranks}"
    sizes = {"FSDP": degrees.dp_shard}
    sizes |= {name.upper(): getattr(degrees, name) for name in OTHER_AXES}
    parts = [f"{name} {size}" for name, size in sizes.items() if size > 1]
    if degrees.dp_replicate > 1:
        parts[: degrees.dp_shard > 1] = [f"HSDP {degrees.dp_replicate} x {degrees.dp_shard}"]
    return f"{' x '.join(parts)} over {ranks}"
