"""Parameters seen as matrices: how one is cut by rows, and which part of it a rank has.

A unit is a matrix that is orthogonalised on its own. A block is a rank's part of one, in one piece
of its memory. Parts that are runs of whole rows are units of their own from the plan on. Others,
columns and rows that take turns, are cut where the matrix lies whole.
"""

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch.distributed.tensor.placement_types import Placement, Shard, _StridedShard

from torchmars.optim.meshes import MeshPlace

Interval = tuple[int, int]
# The part [batch, rows, cols] of a matrix parameter that a rank has.
Extent = tuple[Interval, Interval, Interval]
Extents = tuple[Extent, ...]  # of each shard


@dataclass(frozen=True)
class MatrixShape:
    """A parameter seen as a batch of matrices [batch, rows, cols], each cut by rows into `parts`.

    Two dims are one matrix, three are a batch (experts). With `flatten`, or from four dims on, all
    but the first are flattened into the columns (convolutions). `split` is the number of parts of a
    matrix, or the rows of each: a fused QKV weight has the parts q, k and v. Where it has more rows
    than these, they take turns, as where each head has its own q, k and v. `transposed` matrices
    are stored [in, out], and are cut by columns. With `per_head` the parts are small, and each
    that a rank has whole stays there. Raises `ValueError` for a shape that is no matrix and for a
    split that does not fit it.
    """

    shape: tuple[int, ...]
    flatten: bool = False
    split: int | tuple[int, ...] = 1
    transposed: bool = False
    per_head: bool = False

    def __post_init__(self) -> None:
        if len(self.shape) < 2:
            raise ValueError(
                "a matrix rule needs parameters of at least two dimensions, got one of shape "
                f"{self.shape}"
            )
        rows, together = self.sides[0], sum(self.parts)
        if together != rows and (together <= 0 or rows % together):
            raise ValueError(
                f"split = {self.split} does not divide the {rows} "
                f"{'columns' if self.transposed else 'rows'} of a parameter of shape {self.shape}"
            )

    @property
    def matrix(self) -> tuple[int, int, int]:
        """The whole parameter, as [batch, rows, cols]."""
        if self.flatten or len(self.shape) > 3:
            return 1, self.shape[0], math.prod(self.shape[1:])
        *batch, rows, cols = self.shape
        return math.prod(batch), rows, cols

    @property
    def sides(self) -> tuple[int, int]:
        """The sides of each matrix of the batch, [out, in]: `parts` are of the first."""
        _, rows, cols = self.matrix
        return (cols, rows) if self.transposed else (rows, cols)

    @property
    def parts(self) -> tuple[int, ...]:
        """The rows of each part, or of each of its turns."""
        rows = self.sides[0]
        if not isinstance(self.split, int):
            return tuple(self.split)
        fits = self.split > 0 and rows % self.split == 0
        return (rows // self.split,) * self.split if fits else (-1,)

    @property
    def is_cut_whole(self) -> bool:
        """Whether its parts are no runs of whole rows."""
        return self.transposed or sum(self.parts) < self.matrix[1]

    def as_stack(self, extents: Extents) -> tuple["MatrixShape", Extents]:
        """Return heads of one size as a batch of matrices, and the `extents` within it.

        They lie in memory as before, but the heads of a rank are one block, which costs its host as
        much as one head would. Where an extent cuts a head, all is returned as it is.
        """
        if not self.per_head or self.is_cut_whole or len(self.shape) > 2:
            return self, extents
        heads, rows = len(self.parts), self.parts[0]
        if len({*self.parts}) > 1 or any(
            edge % rows for _, of_rows, _ in extents for edge in of_rows
        ):
            return self, extents
        stack = replace(self, shape=(heads, rows, self.shape[1]), split=1, flatten=False)
        return stack, tuple(
            ((top // rows, bottom // rows), (0, rows), cols) for _, (top, bottom), cols in extents
        )

    def extent(
        self, mesh_shape: Sequence[int], placements: Sequence[Placement], coordinate: Sequence[int]
    ) -> Extent:
        """Return the part of the rank at `coordinate` of the mesh, within [batch, rows, cols].

        Raises `ValueError` if a flattened matrix is sharded over one of its later dims.
        """
        part = intervals(self.shape, mesh_shape, placements, coordinate)
        if self.flatten or len(self.shape) > 3:
            if any(interval != (0, size) for interval, size in zip(part[2:], self.shape[2:])):
                raise ValueError(
                    f"a parameter of shape {self.shape} that is flattened to a matrix can be "
                    "sharded over its first two dimensions only"
                )
            inner = math.prod(self.shape[2:])
            return (0, 1), part[0], (part[1][0] * inner, part[1][1] * inner)
        *batch, rows, cols = part
        return (batch[0] if batch else (0, 1)), rows, cols


def is_stack(shape: Sequence[int], flatten: bool) -> bool:
    """Return whether a parameter of any rule is a batch of several matrices: experts.

    `flatten` is as of `MatrixShape`.
    """
    return len(shape) == 3 and shape[0] > 1 and not flatten


def intervals(
    shape: Sequence[int],
    mesh_shape: Sequence[int],
    placements: Sequence[Placement],
    coordinate: Sequence[int],
) -> tuple[Interval, ...]:
    """Return the part of a tensor that the rank at `coordinate` has: an interval for each dim.

    Shards are as `torch.chunk` cuts them: pieces of ceil(size / n), the last ones shorter or empty.
    A strided shard (FSDP over tensor parallel) is cut after the plain ones of its dim.
    """
    parts = [(0, size) for size in shape]
    # Strided shards are of a class of their own in torch 2.11 to 2.15, with `dim` but no Shard.
    shards = [
        (axis, placement, placement.dim)
        for axis, placement in enumerate(placements)
        if isinstance(placement, Shard | _StridedShard)
    ]
    for axis, _, dim in sorted(shards, key=lambda shard: isinstance(shard[1], _StridedShard)):
        start, stop = parts[dim]
        size = -(-(stop - start) // mesh_shape[axis])
        begin = min(start + size * coordinate[axis], stop)
        parts[dim] = begin, min(begin + size, stop)
    return tuple(parts)


class Units(NamedTuple):
    """Matrices of one shape to orthogonalise, each on its own.

    They are the rows from `row` on of the entries [entry, entry + length) of a batch of
    matrices, parameter number `parameter`. Several entries have these rows and no others.
    """

    parameter: int
    entry: int
    length: int
    row: int
    shape: tuple[int, int]  # [rows, cols] of each

    def part(self, first: int, length: int) -> "Units":
        """Return `length` of them from number `first` on."""
        return self._replace(entry=self.entry + first, length=length)


def units_of(parameter: int, shape: MatrixShape) -> list[Units]:
    """Return the matrices of parameter number `parameter`, in order."""
    batch, rows, cols = shape.matrix
    if shape.is_cut_whole or shape.parts == (rows,):
        return [Units(parameter, 0, batch, 0, (rows, cols))] if batch * rows * cols else []
    starts = list(itertools.accumulate(shape.parts, initial=0))
    return [
        Units(parameter, entry, 1, row, (rows, cols))
        for entry in range(batch)
        for row, rows in zip(starts, shape.parts)
        if rows * cols
    ]


class Block(NamedTuple):
    """A rank's part of units: a slab [length, rows, cols] of some of them, or of a part of each."""

    units: Units
    first: int
    """The first of the units that it has a part of. The others follow."""
    length: int
    rows: slice
    """Within each unit, as `cols`."""
    cols: slice
    start: int
    """Its first element, within the local shard. The others follow: a unit has whole rows."""
    numel: int

    @property
    def is_whole(self) -> bool:
        """Whether it has all rows and columns of its units."""
        return self.numel == self.length * math.prod(self.units.shape)

    def cut(self, size: int) -> Iterator["Block"]:
        """Yield blocks of `size` units, and one of the rest."""
        each = self.numel // self.length
        for done in range(0, self.length, size):
            length = min(size, self.length - done)
            first, start = self.first + done, self.start + done * each
            yield self._replace(first=first, length=length, start=start, numel=length * each)


def block_of(units: Units, extent: Extent) -> Block | None:
    """Return the block of `units` in a rank's `extent`, or None."""
    (b0, b1), (r0, r1), (c0, c1) = extent
    first, last = max(b0, units.entry), min(b1, units.entry + units.length)
    top, bottom = max(r0, units.row), min(r1, units.row + units.shape[0])
    if first >= last or top >= bottom or c0 >= c1:
        return None
    return Block(
        units,
        first - units.entry,
        last - first,
        slice(top - units.row, bottom - units.row),
        slice(c0, c1),
        ((first - b0) * (r1 - r0) + top - r0) * (c1 - c0),
        (last - first) * (bottom - top) * (c1 - c0),
    )


def extents_of_shards(
    shapes: Sequence[MatrixShape], placements: Sequence[Sequence[Placement]], place: MeshPlace
) -> list[Extents]:
    """Return each shard's part of each parameter: a model has few kinds of them."""

    @functools.cache
    def of(shape: MatrixShape, placed: tuple[Placement, ...]) -> Extents:
        return tuple(shape.extent(place.mesh_shape, placed, each) for each in place.coordinates)

    return [of(*kind) for kind in zip(shapes, map(tuple, placements))]
