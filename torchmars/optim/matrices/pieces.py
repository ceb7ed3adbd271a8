"""Tiles that are put together to whole matrices, and matrices that are computed together."""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from torchmars.optim.matrices.buckets import Bucket
from torchmars.optim.matrices.shapes import Units
from torchmars.optim.matrices.tiles import Tile


class Pieces:
    """The tiles that `arrived` of a bucket's owned units, one after the other."""

    def __init__(self, bucket: Bucket, arrived: Tensor) -> None:
        self.arrived = arrived
        self.of_units: dict[Units, list[tuple[Tile, Tensor]]] = {}
        tiles = bucket.incoming.tiles
        for tile, part in zip(tiles, arrived.split([tile.numel for tile in tiles])):
            self.of_units.setdefault(tile.units, []).append((tile, part))
        self._pairs: list[tuple[Tensor, Tensor]] = []

    def put_together(self, alike: Sequence[Units], rows: int, cols: int) -> Tensor:
        """Return whole units [n, rows, cols], those `alike`."""
        lengths = [units.length for units in alike]
        whole = self.arrived.new_empty(sum(lengths), rows, cols)
        self._pairs = []
        for units, slab in zip(alike, whole.split(lengths)):
            for tile, part in self.of_units[units]:
                some = slice(tile.first, tile.first + tile.length)
                of_whole = slab[some, tile.rows, tile.cols]
                self._pairs.append((of_whole, part.view(of_whole.shape)))
        torch._foreach_copy_([each for each, _ in self._pairs], [each for _, each in self._pairs])
        return whole

    def take_apart(self) -> None:
        """Write the units back: their input has been read, and its memory takes the result."""
        torch._foreach_copy_([each for _, each in self._pairs], [each for each, _ in self._pairs])


def by_shape(units: Iterable[Units]) -> dict[tuple[int, int], list[Units]]:
    """Return units by the shape of their matrices."""
    alike: dict[tuple[int, int], list[Units]] = {}
    for each in units:
        alike.setdefault(each.shape, []).append(each)
    return alike


def batches(tiles: Sequence[Tile], elements: int) -> Iterator[list[Tile]]:
    """Yield whole tiles of equal shape together, at most so many `elements`, or one matrix."""
    for matrix, alike in itertools.groupby(tiles, lambda tile: tile.units.shape):
        size = max(1, elements // math.prod(matrix))
        batch: list[Tile] = []
        free = size
        for tile in itertools.chain.from_iterable(each.cut(size) for each in alike):
            if tile.length > free:
                yield batch
                batch, free = [], size
            batch.append(tile)
            free -= tile.length
        yield batch
