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
    many tensors it has. Replicated and plain tensors need none. Creating one is collective when a tensor is
    sharded over more than one mesh dimension: every rank must create it, with the same parameters in the same order.
    """

    def __init__(self) -> None:
        self.groups: dict[Sharding, dist.ProcessGroup] = {}
        self.shardings: list[Sharding | None] = []

    def add(self, parameter: Tensor) -> None:
        """Give `parameter` the next place in the list that `sum` takes."""
        sharding = sharded_dims(parameter)
        self.shardings.append(sharding)
        if sharding is not None and sharding not in self.groups:
            self.groups[sharding] = group_over(*sharding)

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


def group_over(mesh: DeviceMesh, dims: tuple[int, ...]) -> dist.ProcessGroup:
    """The process group of the ranks that differ from this one in the mesh dimensions `dims` only."""
    if len(dims) == 1:
        return mesh.get_group(dims[0])
    others = [dim for dim in range(mesh.ndim) if dim not in dims]
    rows = mesh.mesh.permute(*others, *dims).reshape(-1, math.prod(mesh.size(dim) for dim in dims))
    group, _ = dist.new_subgroups_by_enumeration(rows.tolist())
    return group
