"""Sums over the shards of a tensor: how a rank that holds a part learns the norm of the whole."""

import math

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor


Sharding = tuple[DeviceMesh, tuple[int, ...]]  # a mesh and those of its dimensions over which shards lie


class ShardSum:
    """Adds numbers per tensor over the ranks that hold that tensor's shards.

    Tensors are told apart by the set of mesh dimensions they are sharded over; each set costs one all-reduce, however
    many tensors it has. Replicated and plain tensors need none. Adding a tensor is collective when a tensor is
    sharded over more than one mesh dimension: the ranks of the mesh must add the same parameters in the same order.
    """

    def __init__(self, groups: "MeshGroups") -> None:
        self._mesh_groups = groups
        self.groups: dict[Sharding, dist.ProcessGroup] = {}
        self.shardings: list[Sharding | None] = []

    def add(self, parameter: Tensor) -> None:
        """Give `parameter` the next place in the list that `sum` takes."""
        sharding = sharded_dims(parameter)
        self.shardings.append(sharding)
        if sharding is not None and sharding not in self.groups:
            self.groups[sharding] = self._mesh_groups.over(*sharding)

    def sum(self, partial: list[Tensor]) -> list[Tensor]:
        """The sums over the shards of `partial`, a tensor of one shape for each added parameter, in order."""
        whole = list(partial)
        for sharding, group in self.groups.items():
            places = [place for place, other in enumerate(self.shardings) if other == sharding]
            values = torch.stack([partial[place] for place in places])
            dist.all_reduce(values, group=group)
            for place, value in zip(places, values.unbind()):
                whole[place] = value
        return whole


def sharded_dims(parameter: Tensor) -> Sharding | None:
    """The mesh dimensions over which a DTensor's shards lie; None where every rank has the whole tensor."""
    if not isinstance(parameter, DTensor):
        return None
    mesh = parameter.device_mesh
    dims = tuple(dim for dim, placement in enumerate(parameter.placements)
                 if not placement.is_replicate() and mesh.size(dim) > 1)
    return (mesh, dims) if dims else None


def sharding_key(parameter: Tensor) -> object:
    """Equal for parameters that lie alike on the same mesh; None for plain tensors."""
    if not isinstance(parameter, DTensor):
        return None
    return parameter.device_mesh, (sharded_dims(parameter) or (None, ()))[1]


def ranks_along(mesh: DeviceMesh, dims: tuple[int, ...]) -> list[list[int]]:
    """Global ranks in rows: the ranks of a row differ in the mesh dimensions `dims` only."""
    others = [dim for dim in range(mesh.ndim) if dim not in dims]
    return mesh.mesh.permute(*others, *dims).reshape(-1, math.prod(mesh.size(dim) for dim in dims)).tolist()


class MeshGroups:
    """Process groups over sets of mesh dimensions, each made once. Making one is collective over its ranks."""

    def __init__(self) -> None:
        self._made: dict[Sharding, dist.ProcessGroup] = {}

    def over(self, mesh: DeviceMesh, dims: tuple[int, ...]) -> dist.ProcessGroup:
        """The group of the ranks that differ from this one in the mesh dimensions `dims` only."""
        if len(dims) == 1:
            return mesh.get_group(dims[0])
        if (mesh, dims) not in self._made:
            mine = next(row for row in ranks_along(mesh, dims) if dist.get_rank() in row)
            # Among its own ranks only: the mesh may be a part of the world.
            self._made[mesh, dims] = dist.new_group(mine, use_local_synchronization=True)
        return self._made[mesh, dims]
