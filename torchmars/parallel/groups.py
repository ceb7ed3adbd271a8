"""The axes along which ranks differ, and the meshes and groups that follow from them."""

from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from torchmars.config import Degrees
from torchmars.optim.meshes import group_over, ranks_along

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

    rank: int
    """The number of this rank in the group."""
    size: int
    process_group: dist.ProcessGroup

    def send(self, tensor: torch.Tensor, rank: int) -> None:
        """Send `tensor` to rank number `rank` of the group, which calls `receive`."""
        dist.send(tensor.contiguous(), group=self.process_group, group_dst=rank)

    def receive(self, target: torch.Tensor, rank: int) -> torch.Tensor:
        """Receive data from rank number `rank` of the group into `target`, and return it."""
        dist.recv(target, group=self.process_group, group_src=rank)
        return target


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
        group = of_meshes.get(name) or group_over(row, mesh)
        groups[name] = RankGroup(row.index(rank), len(row), group)
    return groups


def rows_along(ranks: torch.Tensor, axes: tuple[str, ...]) -> list[list[int]]:
    """Return the ranks in rows; the ranks of one row differ along `axes` only.

    `ranks` has a dim for each of `AXES`.
    """
    return ranks_along(ranks, [AXES.index(axis) for axis in axes])


def make_control_group() -> dist.ProcessGroup:
    """Make a CPU group of all ranks, and connect those that will talk to each other.

    Where gloo connects a pair at its first message (`connection.start`), it would wait for ever for
    a rank that has died before (torch 2.11 to 2.15).
    """
    group = dist.new_group(backend="gloo", timeout=timedelta(days=7))
    assert isinstance(group, dist.ProcessGroup)
    one, first = torch.ones(1), dist.get_rank() == 0
    each = [torch.ones(1) for _ in range(dist.get_world_size())] if first else None
    dist.all_reduce(one, group=group)  # a ring
    dist.broadcast(one, group=group, group_src=0)  # a tree
    dist.gather(one, each, group=group, group_dst=0)  # all with the first rank
    return group
