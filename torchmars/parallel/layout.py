"""The one authority for axes: which ranks share which part of the work."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from torchmars.config import Degrees, ParallelismConfig
from torchmars.core.console import say
from torchmars.core.errors import UserError
from torchmars.core.words import counted
from torchmars.optim.meshes import ranks_along

T = TypeVar("T")

# From the outermost to the innermost. All are always there, most of them with size 1.
AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
OTHER_AXES = ("cp", "tp", "pp")  # those that do not multiply the data
# Sets of axes that have a name of their own.
JOINT_AXES = {
    "world": AXES,
    # Ranks that read different samples.
    "data": ("dp_replicate", "dp_shard"),
    # Ranks that the loss is added up over: the last stage of a pipeline has it, the others add 0.
    "loss": ("pp", "dp_replicate", "dp_shard", "cp"),
    # Ranks that work on the same samples.
    "sample": ("pp", "cp", "tp"),
    # Ranks that have a part of the same layers, or a copy.
    "stage": ("dp_replicate", "dp_shard", "cp", "tp"),
}
# The axes of the mesh that weights lie on: FSDP shards over dp_shard and cp together.
WEIGHT_AXES = ("pp", "dp_replicate", "fsdp", "tp")
# `ep` is a second view of the inner axes: experts are dealt out over neighbours along dp_shard, cp
# and tp, and FSDP shards them over the rest of those ranks.
EXPERT_MESH_AXES = ("pp", "dp_replicate", "expert_fsdp", "ep")


@dataclass(frozen=True)
class RankGroup:
    """Ranks that differ along certain axes only, as this rank sees them."""

    name: str
    rank: int
    """The number of this rank in the group."""
    size: int
    process_group: dist.ProcessGroup

    def send(self, tensor: torch.Tensor, rank: int) -> None:
        """Send `tensor` to rank number `rank` of the group, which calls `receive`."""
        dist.send(tensor.contiguous(), group=self.process_group, group_dst=rank)

    def receive(self, target: torch.Tensor, rank: int) -> torch.Tensor:
        """Fill `target` with what rank number `rank` of the group sends, and return it."""
        dist.recv(target, group=self.process_group, group_src=rank)
        return target


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
    mesh: DeviceMesh
    """All ranks, with the axes `AXES`."""
    weight_mesh: DeviceMesh
    """All ranks, with the axes `WEIGHT_AXES`."""
    expert_mesh: DeviceMesh | None
    """All ranks, with the axes `EXPERT_MESH_AXES`; None where ep = 1."""
    groups: dict[str, RankGroup]
    """By the name of an axis, of a set of axes in `JOINT_AXES`, or "ep"."""
    control: dist.ProcessGroup
    """CPU group of all ranks for messages. It waits for days: rank 0 may prepare data that long."""

    @classmethod
    def create(cls, device: torch.device, degrees: Degrees) -> "Layout":
        """Lay out the ranks of the default process group. Collective."""
        mesh, weights, experts = make_meshes(device.type, degrees)
        groups = make_groups(mesh, experts)
        return cls(device, mesh, weights, experts, groups, make_control_group())

    @classmethod
    def simulate(
        cls, config: ParallelismConfig, world_size: int, rank: int, device: torch.device
    ) -> "Layout":
        """Return the layout of one of `world_size` ranks that do not exist.

        Their collectives, torch's fake ones, return at once and change nothing. The mesh is one of
        CPUs; `device` is only what the layout calls itself. Call it once in a process. Raises
        `UserError` where the degrees do not make `world_size`.
        """
        degrees = config.degrees(world_size)
        dist.init_process_group("fake", rank=rank, world_size=world_size)
        mesh, weights, experts = make_meshes("cpu", degrees)
        groups = make_groups(mesh, experts)
        assert dist.group.WORLD is not None
        return cls(device, mesh, weights, experts, groups, dist.group.WORLD)

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
    def tensor_mesh(self) -> DeviceMesh:
        """The mesh that tensor parallelism cuts weights over, of one axis."""
        return self.weight_mesh["tp"]

    @property
    def norm_group(self) -> dist.ProcessGroup | None:
        """The ranks that hold different layers; None if every rank has a part of each layer."""
        stages = self.group("pp")
        return stages.process_group if stages.size > 1 else None

    def on_all(self, work: Callable[[], object]) -> None:
        """Run `work` on every rank, and wait until all have done so.

        A `UserError` of one rank is raised on every rank. Any other exception is raised again on
        the rank that had it; the other ranks raise a RuntimeError. Where all goes well, the ranks
        exchange one number: what they exchanged beside it would grow with their number.
        """
        failure: Exception | None = None
        try:
            work()
        except Exception as error:
            failure = error
        rank, size = self.world.rank, self.world.size
        failed = torch.tensor(size if failure is None else rank)
        dist.all_reduce(failed, dist.ReduceOp.MIN, group=self.control)
        if (first := int(failed)) == size:
            return
        told: Exception = RuntimeError(f"rank {rank}: {failure!r}")
        told = self._broadcast(failure if isinstance(failure, UserError) else told, first)
        raise failure or told

    def on_first(self, work: Callable[[], T]) -> T:
        """Run `work` on the first rank; return its result, or raise its error, on every rank."""
        result: list[T] = []
        self.on_all(lambda: result.append(work()) if self.first else None)
        return self._broadcast(result, 0)[0]

    def only_first(self, work: Callable[[], T]) -> T | None:
        """Run `work` on the first rank, which alone gets its result; raise its error on all."""
        result: list[T] = []
        self.on_all(lambda: result.append(work()) if self.first else None)
        return result[0] if result else None

    def gather(self, work: Callable[[], T]) -> list[T]:
        """Run `work` on every rank; return the results of all on the first rank, none elsewhere.

        Errors are raised as in `on_all`.
        """
        result: list[T] = []
        self.on_all(lambda: result.append(work()))
        found: list[T] = result * self.world.size if self.first else []
        dist.gather_object(result[0], found or None, group=self.control, group_dst=0)
        return found

    def agree(self, able: Callable[[], bool]) -> bool:
        """Return whether `able` is true on every rank. Errors are raised as in `on_all`."""
        unable: list[bool] = []
        self.on_all(lambda: unable.append(not able()))
        return not self.exchange_flags(*unable).result()[0]

    def _broadcast(self, value: T, rank: int) -> T:
        """Return the `value` of a rank on every rank."""
        values = [value]
        dist.broadcast_object_list(values, group=self.control, group_src=rank)
        return values[0]

    def say(self, text: str) -> None:
        """Print a line, on the first rank only."""
        if self.first:
            say(text)

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

    def describe(self) -> str:
        """Return the layout in words, for the console."""
        backend = "nccl" if self.device.type == "cuda" else "gloo"
        size, replicas = self.world.size, self.group("dp_replicate").size
        ranks = f"{counted(size, 'rank')} ({self.device.type}, {backend})"
        shards, ep = self.group("dp_shard").size, self.group("ep").size
        if ep > 1:
            ranks += f", EP {ep}"
        if size == 1:
            return ranks
        if size == shards:
            return f"FSDP over {ranks}"
        sizes = {"FSDP": shards} | {name.upper(): self.group(name).size for name in OTHER_AXES}
        parts = [f"{name} {size}" for name, size in sizes.items() if size > 1]
        if replicas > 1:
            parts[: shards > 1] = [f"HSDP {replicas} x {shards}"]
        return f"{' x '.join(parts)} over {ranks}"


def make_meshes(
    device_type: str, degrees: Degrees
) -> tuple[DeviceMesh, DeviceMesh, DeviceMesh | None]:
    """Make the meshes `mesh`, `weight_mesh` and `expert_mesh` of a `Layout`. Collective."""
    sizes = tuple(getattr(degrees, axis) for axis in AXES)
    pp, dp_replicate, dp_shard, cp, tp = sizes
    make = partial(init_device_mesh, device_type)
    mesh = make(sizes, mesh_dim_names=AXES)
    weights = make((pp, dp_replicate, dp_shard * cp, tp), mesh_dim_names=WEIGHT_AXES)
    if degrees.ep == 1:
        return mesh, weights, None
    rest = dp_shard * cp * tp // degrees.ep
    experts = make((pp, dp_replicate, rest, degrees.ep), mesh_dim_names=EXPERT_MESH_AXES)
    return mesh, weights, experts


def make_groups(mesh: DeviceMesh, expert_mesh: DeviceMesh | None) -> dict[str, RankGroup]:
    """Make the group of this rank along each axis and set of axes. Collective."""
    rank, ranks, groups = dist.get_rank(), mesh.mesh, {}
    rows = {name: rows_along(ranks, axes) for name, axes in JOINT_AXES.items()}
    rows |= {axis: rows_along(ranks, (axis,)) for axis in AXES}
    of_meshes = {axis: mesh.get_group(axis) for axis in AXES}
    if expert_mesh is None:
        rows["ep"] = ranks.view(-1, 1).tolist()
    else:
        rows["ep"] = ranks_along(expert_mesh.mesh, [EXPERT_MESH_AXES.index("ep")])
        of_meshes["ep"] = expert_mesh.get_group("ep")
    for name, each in rows.items():
        row = next(row for row in each if rank in row)
        group = of_meshes.get(name) or _group_over(row, mesh)
        groups[name] = RankGroup(name, row.index(rank), len(row), group)
    return groups


def rows_along(ranks: torch.Tensor, axes: tuple[str, ...]) -> list[list[int]]:
    """Return the ranks in rows; those of one row differ along `axes` only.

    `ranks` has a dim for each of `AXES`.
    """
    return ranks_along(ranks, [AXES.index(axis) for axis in axes])


def _group_over(row: list[int], mesh: DeviceMesh) -> dist.ProcessGroup:
    """Return the process group of the ranks in `row`: one that exists, where there is one."""
    if len(row) == dist.get_world_size():
        assert dist.group.WORLD is not None
        return dist.group.WORLD
    for axis in AXES:
        group = mesh.get_group(axis)
        if dist.get_process_group_ranks(group) == row:
            return group
    group = dist.new_group(row, use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup)
    return group


def make_control_group() -> dist.ProcessGroup:
    """Make a CPU group of all ranks, and connect those that will talk to each other.

    Where gloo connects a pair at its first message (`connection.start`), it would wait for ever for
    a rank that has died before (torch 2.11 to 2.13).
    """
    group = dist.new_group(backend="gloo", timeout=timedelta(days=7))
    assert isinstance(group, dist.ProcessGroup)
    one, first = torch.ones(1), dist.get_rank() == 0
    each = [torch.ones(1) for _ in range(dist.get_world_size())] if first else None
    dist.all_reduce(one, group=group)  # a ring
    dist.broadcast(one, group=group, group_src=0)  # a tree
    dist.gather(one, each, group=group, group_dst=0)  # all with the first rank
    return group
