"""Norms over many ranks: of a tensor in shards, and of a model in parts and copies."""

import contextlib
import functools
import math
from collections.abc import Iterable, Iterator, Sequence

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

        In place. The `total`, 0-d, is at least 0 or not finite. There are as many rows
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
