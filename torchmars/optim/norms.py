"""Norms of what lies on many ranks: of a tensor in shards, and of a model in parts and copies."""

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

Sharding = tuple[
    DeviceMesh, tuple[int, ...]
]  # a mesh and those of its dimensions over which shards lie


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


class Agreement:
    """Makes numbers of a rank's parameters those of the whole model, the same on every rank.

    Copies give the same numbers, unless one of them is broken: the largest number counts, and one
    that is not finite is larger than all others. That takes one all-reduce for each mesh, over the
    dimensions along which copies lie. Ranks of `norm_group` hold different parts of the model:
    their numbers are summed, in one more all-reduce.
    """

    def __init__(self, groups: "MeshGroups", norm_group: dist.ProcessGroup | None) -> None:
        self.norm_group = norm_group
        self.copies: list[dist.ProcessGroup] = []
        self._mesh_groups = groups

    def cover(self, parameters: Iterable[Tensor]) -> None:
        """Find the groups for all `parameters` of an optimizer. Collective over their meshes."""
        keys = list(dict.fromkeys(map(sharding_key, parameters)))
        meshes = list(dict.fromkeys(key[0] for key in keys if key is not None))
        # Along a dimension that all parameters are sharded over, the sums over shards are the same.
        settled: set[int] = set()
        if len(meshes) == 1 and None not in keys:
            settled = set.intersection(*(set(key[1]) for key in keys))
        self.copies = []
        for mesh in meshes:
            dims = tuple(
                dim for dim in range(mesh.ndim) if mesh.size(dim) > 1 and dim not in settled
            )
            if dims:
                self.copies.append(self._mesh_groups.over(mesh, dims))

    def settle(self, values: Tensor) -> Tensor:
        """The whole model's numbers from this rank's `values`, each at least 0 or not finite.

        `values` has any shape, and may be changed.
        """
        if self.copies:  # whether MAX keeps a NaN is up to the backend
            values = values.nan_to_num(nan=math.inf, posinf=math.inf)
        for group in self.copies:
            dist.all_reduce(values, op=dist.ReduceOp.MAX, group=group)
        if self.norm_group is not None:
            dist.all_reduce(values, group=self.norm_group)
        return values

    def add_up(self, numbers: dict[str, list[float]]) -> dict[str, list[float]]:
        """The sums over `norm_group`, name by name; a rank need not have all names."""
        if self.norm_group is None:
            return numbers
        everyone: list[dict[str, list[float]]] = [{}] * dist.get_world_size(self.norm_group)
        dist.all_gather_object(everyone, numbers, group=self.norm_group)

        def rows(name: str) -> list[list[float]]:
            return [each[name] for each in everyone if name in each]

        names = dict.fromkeys(name for each in everyone for name in each)
        return {name: [sum(each) for each in zip(*rows(name))] for name in names}


def sharded_dims(parameter: Tensor) -> Sharding | None:
    """The mesh dimensions over which a DTensor's shards lie; None where every rank has the whole tensor."""
    if not isinstance(parameter, DTensor):
        return None
    mesh = parameter.device_mesh
    dims = tuple(
        dim
        for dim, placement in enumerate(parameter.placements)
        if not placement.is_replicate() and mesh.size(dim) > 1
    )
    return (mesh, dims) if dims else None


def sharding_key(parameter: Tensor) -> Sharding | None:
    """Equal for parameters that lie alike on the same mesh; None for plain tensors."""
    if not isinstance(parameter, DTensor):
        return None
    return parameter.device_mesh, (sharded_dims(parameter) or (None, ()))[1]


def ranks_along(mesh: DeviceMesh, dims: tuple[int, ...]) -> list[list[int]]:
    """Global ranks in rows: the ranks of a row differ in the mesh dimensions `dims` only."""
    others = [dim for dim in range(mesh.ndim) if dim not in dims]
    return (
        mesh.mesh.permute(*others, *dims)
        .reshape(-1, math.prod(mesh.size(dim) for dim in dims))
        .tolist()
    )


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
