"""Norms of what lies on many ranks: of a tensor in shards, and of a model in parts and copies."""

import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from torchmars.optim.meshes import MeshAxes, MeshGroups, layout_key, shard_axes


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
        self.axes: list[MeshAxes | None] = []

    def add(self, parameter: Tensor) -> None:
        """Give `parameter` the next place among the tensors that `sum` takes."""
        axes = shard_axes(parameter)
        self.axes.append(axes)
        if axes is not None and axes not in self.groups:
            self.groups[axes] = self._mesh_groups.over(*axes)

    def sum(self, partial: Sequence[Tensor]) -> list[Tensor]:
        """Return the sums over the shards of all tensors from `partial`, which have one shape."""
        whole = list(partial)
        for axes, group in self.groups.items():
            places = [place for place, each in enumerate(self.axes) if each == axes]
            values = torch.stack([partial[place] for place in places])
            dist.all_reduce(values, group=group)
            for place, value in zip(places, values.unbind()):
                whole[place] = value
        return whole


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

    def settle(
        self, totals: Tensor, of_parameters: Sequence[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the whole model's `totals`, and each parameter's numbers as all copies take them.

        Each of the `totals`, [n], is at least 0 or not finite; they may be changed. There are as
        many `of_parameters` as were covered, of one shape [m].
        """
        settled = list(of_parameters)
        for group, places in self.copies:
            rows = torch.stack([settled[place] for place in places])
            numbers = torch.cat([totals, rows.flatten()])
            # Whether MAX keeps a NaN is up to the backend.
            numbers = numbers.nan_to_num(nan=math.inf, posinf=math.inf)
            dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=group)
            totals, rows = numbers[: len(totals)], numbers[len(totals) :].view_as(rows)
            for place, row in zip(places, rows.unbind()):
                settled[place] = row
        if self.norm_group is not None:
            dist.all_reduce(totals, group=self.norm_group)
        return totals, settled

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
