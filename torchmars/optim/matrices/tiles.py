"""Tiles: a rank's parts of matrices, each in one piece of its memory."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch.distributed.tensor.placement_types import Placement

from torchmars.optim.matrices.shapes import Block, Blocks, MatrixShape, Units
from torchmars.optim.meshes import MeshPlace


class Tile(NamedTuple):
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

    @property
    def matrix(self) -> int:
        """The elements that it has of each unit."""
        return (self.rows.stop - self.rows.start) * (self.cols.stop - self.cols.start)

    @property
    def numel(self) -> int:
        """Its elements."""
        return self.length * self.matrix

    @property
    def is_whole(self) -> bool:
        """Whether it has all rows and columns of its units."""
        return self.matrix == self.units.rows * self.units.cols

    def cut(self, size: int) -> Iterator["Tile"]:
        """Yield tiles of `size` units, and one of the rest."""
        for done in range(0, self.length, size):
            yield self._replace(
                first=self.first + done,
                length=min(size, self.length - done),
                start=self.start + done * self.matrix,
            )


def tile_of(units: Units, block: Block) -> Tile | None:
    """Return the tile of `units` in a rank's `block`, or None."""
    (b0, b1), (r0, r1), (c0, c1) = block
    first, last = max(b0, units.entry), min(b1, units.entry + units.length)
    top, bottom = max(r0, units.row), min(r1, units.row + units.rows)
    if first >= last or top >= bottom or c0 >= c1:
        return None
    return Tile(
        units,
        first - units.entry,
        last - first,
        slice(top - units.row, bottom - units.row),
        slice(c0, c1),
        ((first - b0) * (r1 - r0) + top - r0) * (c1 - c0),
    )


def blocks_of_shards(
    shapes: Sequence[MatrixShape], placements: Sequence[Sequence[Placement]], place: MeshPlace
) -> list[Blocks]:
    """Return each shard's part of each parameter: a model has few kinds of them."""
    known: dict[tuple[MatrixShape, tuple[Placement, ...]], Blocks] = {}
    for kind in zip(shapes, map(tuple, placements)):
        if kind not in known:
            shape, placed = kind
            known[kind] = tuple(
                shape.block(place.mesh_shape, placed, each) for each in place.coordinates
            )
    return [known[kind] for kind in zip(shapes, map(tuple, placements))]
