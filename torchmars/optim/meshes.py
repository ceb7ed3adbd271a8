"""Where shards and copies of parameters lie on a mesh of ranks, and sums over those ranks."""

import contextlib
import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

MeshAxes = tuple[DeviceMesh, tuple[int, ...]]  # a mesh, and some of its axes


def layout_key(parameter: Tensor) -> MeshAxes | None:
    """Return the mesh of a DTensor, and the axes over which its shards lie; None for a tensor.

    Parameters with one key lie alike. Along an axis of one rank nothing is sharded.
    """
    if not isinstance(parameter, DTensor):
        return None
    mesh = parameter.device_mesh
    placed = enumerate(parameter.placements)
    return mesh, tuple(axis for axis, p in placed if not p.is_replicate() and mesh.size(axis) > 1)


def ranks_along(ranks: Tensor, axes: Sequence[int]) -> list[list[int]]:
    """Return the ranks of a mesh in rows: the ranks of a row differ along `axes` only.

    `ranks` is the mesh as a tensor with a dim for each axis, as `DeviceMesh.mesh`.
    """
    others = [axis for axis in range(ranks.ndim) if axis not in axes]
    size = math.prod(ranks.shape[axis] for axis in axes)
    return ranks.permute(*others, *axes).reshape(-1, size).tolist()


def group_over(row: list[int], mesh: DeviceMesh) -> dist.ProcessGroup:
    """Return the process group of the ranks in `row`: one that exists, where there is one.

    Making one is collective over its ranks: the mesh may be a part of the world. torch (2.11 to
    2.15) then names it by the number of a rank's groups: ranks that differ in this, as stages of a
    pipeline may, wait for each other for ever.
    """
    assert dist.group.WORLD is not None
    for group in (dist.group.WORLD, *map(mesh.get_group, range(mesh.ndim))):
        if dist.get_process_group_ranks(group) == row:
            return group
    return dist.new_group(row, use_local_synchronization=True)


class MeshGroups(dict[MeshAxes, dist.ProcessGroup]):
    """For a mesh and some of its axes the group of the ranks that differ from this one there."""

    def __missing__(self, key: MeshAxes) -> dist.ProcessGroup:
        mesh, axes = key
        mine = next(row for row in ranks_along(mesh.mesh, axes) if dist.get_rank() in row)
        return self.setdefault(key, group_over(mine, mesh))


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
        return len(self.coordinates)

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        return [group for group in (self.shard_group, self.replica_group) if group is not None]


def mesh_place(parameter: Tensor, groups: MeshGroups) -> MeshPlace:
    """Return this rank's place on the mesh of `parameter`. Collective over it.

    Raises `ValueError` for a mesh whose ranks do not ascend along its axes.
    """
    if (key := layout_key(parameter)) is None:
        return MeshPlace([0], (), [[]], 0, 0, None, None)
    mesh, axes = key
    others = tuple(axis for axis in range(mesh.ndim) if axis not in axes)
    grid = torch.tensor(ranks_along(mesh.mesh, axes))  # [replicas, shards]
    replica, shard = grid.eq(dist.get_rank()).nonzero()[0].tolist()
    shard_group = groups[mesh, axes] if grid.shape[1] > 1 else None
    replica_group = groups[mesh, others] if grid.shape[0] > 1 else None
    for group, wanted in ((shard_group, grid[replica]), (replica_group, grid[:, shard])):
        if group is not None and dist.get_process_group_ranks(group) != wanted.tolist():
            raise ValueError("the ranks of a mesh must ascend along its axes")
    coordinates = [mesh.mesh.eq(rank).nonzero()[0].tolist() for rank in grid[replica]]
    ranks, shape = grid.flatten().tolist(), tuple(mesh.shape)
    return MeshPlace(ranks, shape, coordinates, replica, shard, shard_group, replica_group)


class ModelSums:
    """Sums over all ranks of numbers that a rank has for each parameter.

    First they are added over the shards of each tensor: those that are sharded over the same mesh
    axes in one all-reduce, however many they are. Copies give the same numbers, unless one of them
    is broken, or adds up in another order: the largest number is taken, and one that is not finite
    is larger than all others. That takes one all-reduce for each mesh that has copies. Ranks of
    `norm_group` have different parts of the model: their sums are added in one more all-reduce.
    """

    def __init__(self, groups: MeshGroups, norm_group: dist.ProcessGroup | None) -> None:
        self.norm_group, self._mesh_groups = norm_group, groups
        self._shards: list[tuple[dist.ProcessGroup, list[int]]] = []
        """For each set of mesh axes its ranks, and the numbers of the parameters sharded so."""
        self._copies: list[tuple[dist.ProcessGroup, list[int]]] = []
        """For each mesh the ranks with copies, and the numbers of the parameters that they share:
        those on the mesh, and plain ones."""

    def cover(self, parameters: Iterable[Tensor]) -> None:
        """Find the groups for all `parameters` of an optimizer. Collective over their meshes."""
        keys = [layout_key(parameter) for parameter in parameters]
        sharded: dict[MeshAxes, list[int]] = {}
        for place, key in enumerate(keys):
            if key is not None and key[1]:
                sharded.setdefault(key, []).append(place)
        self._shards = [(self._mesh_groups[key], each) for key, each in sharded.items()]
        axes_of_all = [set(key[1]) for key in keys if key is not None]
        meshes = list(dict.fromkeys(key[0] for key in keys if key is not None))
        # Along an axis that all parameters are sharded over, the sums over shards are the same.
        alike = len(meshes) == 1 and None not in keys
        summed = set.intersection(*axes_of_all) if alike else set()
        self._copies = []
        for mesh in meshes:
            axes = tuple(
                axis for axis in range(mesh.ndim) if mesh.size(axis) > 1 and axis not in summed
            )
            if axes:
                shared = [place for place, key in enumerate(keys) if key is None or key[0] == mesh]
                self._copies.append((self._mesh_groups[mesh, axes], shared))

    def sum_(self, numbers: Tensor) -> Tensor:
        """Make each parameter's `numbers` [p, m] those of the whole tensor, the same on all copies.

        In place. Return the sum of the first ones over the whole model, 0-d: they are at least 0,
        or not finite.
        """
        for group, places in self._shards:
            with _rows(numbers, places) as rows:
                dist.all_reduce(rows, group=group)
        total = numbers.sum(0)[0]
        for group, places in self._copies:
            with _rows(numbers, places) as rows:
                both = torch.cat([total[None], rows.flatten()])
                # Whether MAX keeps a NaN is up to the backend.
                both = both.nan_to_num(nan=math.inf, posinf=math.inf)
                dist.all_reduce(both, op=dist.ReduceOp.MAX, group=group)
                total.copy_(both[0])
                rows.copy_(both[1:].view_as(rows))
        if self.norm_group is not None:
            dist.all_reduce(total, group=self.norm_group)
        return total

    def add_up(self, numbers: dict[str, list[float]]) -> dict[str, list[float]]:
        """Return the sums over `norm_group`, name by name; a rank need not have all names."""
        if self.norm_group is None:
            return numbers
        everyone: list[dict[str, list[float]]] = [{}] * dist.get_world_size(self.norm_group)
        dist.all_gather_object(everyone, numbers, group=self.norm_group)
        sums: dict[str, list[float]] = {}
        for name, row in (pair for each in everyone for pair in each.items()):
            sums[name] = [*map(sum, zip(sums[name], row))] if name in sums else row
        return sums


@contextlib.contextmanager
def _rows(values: Tensor, places: Sequence[int]) -> Iterator[Tensor]:
    """Lend the rows of `values` at the `places`, to be changed: all of them are not copied."""
    if len(places) == len(values):
        yield values
        return
    index = _on_device(tuple(places), values.device)
    rows = values[index]
    yield rows
    values[index] = rows


@functools.lru_cache  # a step waits for no copy to a GPU
def _on_device(places: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(places).to(device)
