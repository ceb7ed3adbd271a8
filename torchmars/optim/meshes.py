"""Where shards and copies of parameters lie on a mesh of ranks, and the groups of those ranks."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

MeshAxes = tuple[DeviceMesh, tuple[int, ...]]  # a mesh, and some of its axes


def shard_axes(parameter: Tensor) -> MeshAxes | None:
    """Return the mesh axes over which a DTensor's shards lie.

    None if every rank has the whole tensor.
    """
    if not isinstance(parameter, DTensor):
        return None
    mesh = parameter.device_mesh
    axes = tuple(
        axis
        for axis, placement in enumerate(parameter.placements)
        if not placement.is_replicate() and mesh.size(axis) > 1
    )
    return (mesh, axes) if axes else None


def layout_key(parameter: Tensor) -> MeshAxes | None:
    """Return a key of parameters that lie alike on the same mesh; None for plain ones."""
    if not isinstance(parameter, DTensor):
        return None
    return parameter.device_mesh, (shard_axes(parameter) or (None, ()))[1]


def ranks_along(ranks: Tensor, axes: Sequence[int]) -> list[list[int]]:
    """Return the ranks of a mesh in rows: the ranks of a row differ along `axes` only.

    `ranks` is the mesh as a tensor with a dim for each axis, as `DeviceMesh.mesh`.
    """
    others = [axis for axis in range(ranks.ndim) if axis not in axes]
    size = math.prod(ranks.shape[axis] for axis in axes)
    return ranks.permute(*others, *axes).reshape(-1, size).tolist()


class MeshGroups:
    """Process groups over sets of mesh axes, each made once.

    Making one is collective over its ranks.
    """

    def __init__(self) -> None:
        self._made: dict[MeshAxes, dist.ProcessGroup] = {}

    def over(self, mesh: DeviceMesh, axes: tuple[int, ...]) -> dist.ProcessGroup:
        """Return the group of the ranks that differ from this one in the mesh `axes` only."""
        if len(axes) == 1:
            return mesh.get_group(axes[0])
        if (mesh, axes) not in self._made:
            mine = next(row for row in ranks_along(mesh.mesh, axes) if dist.get_rank() in row)
            # Among its own ranks only: the mesh may be a part of the world.
            self._made[mesh, axes] = dist.new_group(mine, use_local_synchronization=True)
        return self._made[mesh, axes]


@dataclass
class MeshPlace:
    """This rank's place among the ranks that have shards and copies of parameters that lie alike.

    Plain tensors have a mesh of one rank: this one.
    """

    ranks: list[int]
    """All ranks of the mesh: the shards of the first replica, then of the others."""
    mesh_shape: tuple[int, ...]
    coordinates: list[list[int]]
    """The ranks of this rank's replica, by their place on the mesh."""
    replica: int
    shard: int
    shard_group: dist.ProcessGroup | None
    """The ranks of this replica; None if that is this rank alone."""
    replica_group: dist.ProcessGroup | None
    """The ranks that have the same shards; None if that is this rank alone."""

    @property
    def shards(self) -> int:
        """How many ranks share a replica."""
        return len(self.coordinates)

    @property
    def replicas(self) -> int:
        """How many replicas there are."""
        return len(self.ranks) // self.shards

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """The groups of shards and replicas, where there are more ranks than this one."""
        return [group for group in (self.shard_group, self.replica_group) if group is not None]


def mesh_place(parameter: Tensor, groups: MeshGroups) -> MeshPlace:
    """Return this rank's place on the mesh of `parameter`. Collective over it.

    Raises `ValueError` for a mesh whose ranks do not ascend along its axes.
    """
    if not isinstance(parameter, DTensor):
        return MeshPlace([0], (), [[]], 0, 0, None, None)
    mesh = parameter.device_mesh
    axes = (shard_axes(parameter) or (mesh, ()))[1]
    others = tuple(axis for axis in range(mesh.ndim) if axis not in axes)
    grid = torch.tensor(ranks_along(mesh.mesh, axes))  # [replicas, shards]
    replica, shard = grid.eq(dist.get_rank()).nonzero()[0].tolist()
    shard_group = groups.over(mesh, axes) if grid.shape[1] > 1 else None
    replica_group = groups.over(mesh, others) if grid.shape[0] > 1 else None
    for group, wanted in ((shard_group, grid[replica]), (replica_group, grid[:, shard])):
        if group is not None and dist.get_process_group_ranks(group) != wanted.tolist():
            raise ValueError("the ranks of a mesh must ascend along its axes")
    coordinates = [mesh.mesh.eq(rank).nonzero()[0].tolist() for rank in grid[replica]]
    ranks = grid.flatten().tolist()
    return MeshPlace(
        ranks, tuple(mesh.shape), coordinates, replica, shard, shard_group, replica_group
    )
