"""Where shards and copies of parameters lie on a mesh of ranks, and sums over those ranks.

A step's sums are made in two halves: over the shards of each tensor, then over the model.
"""

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


class ShardSum:
    """Adds numbers per tensor over the ranks that have that tensor's shards.

    Tensors that are sharded over the same mesh axes are added in one all-reduce, however many they
    are. Replicated and plain tensors need none. Adding a tensor is collective when a tensor is
    sharded over more than one mesh axis: the ranks of the mesh must add the same parameters in the
    same order.
    """

    def __init__(self, groups: MeshGroups) -> None:
        self._mesh_groups = groups
        self.groups: dict[MeshAxes, dist.ProcessGroup] = {}
        self._places: dict[MeshAxes, list[int]] = {}  # of the tensors
        self._count = 0

    def add(self, parameter: Tensor) -> None:
        """Give `parameter` the next place among the tensors that `sum` takes."""
        axes = shard_axes(parameter)
        if axes is not None:
            if axes not in self.groups:
                self.groups[axes] = self._mesh_groups.over(*axes)
            self._places.setdefault(axes, []).append(self._count)
        self._count += 1

    def sum_(self, values: Tensor) -> None:
        """Add up over the shards, in place. `values` [n, ...] has the numbers of each tensor."""
        for axes, group in self.groups.items():
            with _rows(values, self._places[axes]) as rows:
                dist.all_reduce(rows, group=group)


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


class ModelTotals:
    """Makes numbers of a rank's parameters those of the whole model, the same on every rank.

    Copies give the same numbers, unless one of them is broken, or adds up in another order: the
    largest number is taken, and one that is not finite is larger than all others. That takes one
    all-reduce for each mesh, over the axes along which copies lie. Ranks of `norm_group` have
    different parts of the model: their numbers are summed, in one more all-reduce.
    """

    def __init__(self, groups: MeshGroups, norm_group: dist.ProcessGroup | None) -> None:
        self.norm_group = norm_group
        self.copies: list[tuple[dist.ProcessGroup, list[int]]] = []
        """For each mesh the ranks with copies, and the numbers of the parameters that they share:
        those on the mesh, and plain ones."""
        self._mesh_groups = groups

    def cover(self, parameters: Iterable[Tensor]) -> None:
        """Find the groups for all `parameters` of an optimizer. Collective over their meshes."""
        keys = [layout_key(parameter) for parameter in parameters]
        axes_of_all = [set(key[1]) for key in keys if key is not None]
        meshes = list(dict.fromkeys(key[0] for key in keys if key is not None))
        # Along an axis that all parameters are sharded over, the sums over shards are the same.
        alike = len(meshes) == 1 and None not in keys
        summed = set.intersection(*axes_of_all) if alike else set()
        self.copies = []
        for mesh in meshes:
            axes = tuple(
                axis for axis in range(mesh.ndim) if mesh.size(axis) > 1 and axis not in summed
            )
            if axes:
                shared = [place for place, key in enumerate(keys) if key is None or key[0] == mesh]
                self.copies.append((self._mesh_groups.over(mesh, axes), shared))

    def settle_(self, total: Tensor, of_parameters: Tensor) -> None:
        """Make `total` the whole model's, and each parameter's numbers those that all copies take.

        In place. `total`, 0-d, is at least 0 or not finite. There are as many rows
        `of_parameters`, [p, m], as were covered.
        """
        for group, places in self.copies:
            with _rows(of_parameters, places) as rows:
                numbers = torch.cat([total[None], rows.flatten()])
                # Whether MAX keeps a NaN is up to the backend.
                numbers = numbers.nan_to_num(nan=math.inf, posinf=math.inf)
                dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=group)
                total.copy_(numbers[0])
                rows.copy_(numbers[1:].view_as(rows))
        if self.norm_group is not None:
            dist.all_reduce(total, group=self.norm_group)

    def add_up(self, numbers: dict[str, list[float]]) -> dict[str, list[float]]:
        """Return the sums over `norm_group`, name by name; a rank need not have all names."""
        if self.norm_group is None:
            return numbers
        everyone: list[dict[str, list[float]]] = [{}] * dist.get_world_size(self.norm_group)
        dist.all_gather_object(everyone, numbers, group=self.norm_group)

        def rows(name: str) -> list[list[float]]:
            return [each[name] for each in everyone if name in each]

        names = dict.fromkeys(name for each in everyone for name in each)
        return {name: [sum(each) for each in zip(*rows(name))] for name in names}
