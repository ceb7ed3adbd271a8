"""A rank's part of the plan of `owners.py`: what it sends, receives and computes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torchmars.optim.matrices.owners import PlannedBucket
from torchmars.optim.matrices.shapes import Blocks, Units
from torchmars.optim.matrices.tiles import Tile, tile_of
from torchmars.optim.meshes import MeshPlace


class Packing(NamedTuple):
    """The tiles of one all-to-all, in the order in which they lie in memory: rank by rank."""

    tiles: list[Tile]
    elements: list[int]
    """Of all tiles for, or from, each rank of the shard group."""


@dataclass
class Bucket:
    """This rank's work for one bucket."""

    home: bool
    """Whether all matrices lie whole on the shards of their owners: only replicas send anything."""
    by_replica: list[list[Tile]]
    """This rank's tiles of the units that each replica owns, in the order in which they return.
    At home, equal shapes follow each other."""
    outgoing: Packing
    """This rank's tiles of the units that ranks of its replica own. Like the next two without
    tiles at home."""
    incoming: Packing
    """The tiles of the units that this rank owns."""
    owned: list[Units]

    @property
    def travels(self) -> bool:
        """Whether anything of it is sent."""
        return not self.home or len(self.by_replica) > 1


def rank_bucket(planned: PlannedBucket, blocks: Sequence[Blocks], place: MeshPlace) -> Bucket:
    """Return the work of the rank at `place` for a bucket.

    `blocks` has each shard's part of each parameter. The time is linear in the bucket's units, and
    in the rank's own units times the ranks.
    """
    shards = place.shards
    # This rank's tiles by their owner, and those of its units by where they come from.
    outgoing: dict[int, list[Tile]] = {}
    incoming: dict[int, list[Tile]] = {}
    owned = []
    for units, owner in planned.owners:
        tile = tile_of(units, blocks[units.parameter][place.shard])
        if tile is not None:
            outgoing.setdefault(owner, []).append(tile)
        if not planned.home and owner == place.replica * shards + place.shard:
            owned.append(units)
            for source, block in enumerate(blocks[units.parameter]):
                theirs = tile_of(units, block)
                if theirs is not None:
                    incoming.setdefault(source, []).append(theirs)
    by_replica = [
        _packing(outgoing, range(replica * shards, (replica + 1) * shards))
        for replica in range(place.replicas)
    ]
    if planned.home:
        for tiles, _ in by_replica:
            tiles.sort(key=lambda tile: tile.units.shape)
    return Bucket(
        planned.home,
        [tiles for tiles, _ in by_replica],
        Packing([], []) if planned.home else by_replica[place.replica],
        _packing(incoming, range(shards)),
        owned,
    )


def _packing(by_rank: dict[int, list[Tile]], ranks: Sequence[int]) -> Packing:
    """Return the tiles for, or from, these ranks."""
    packing = Packing([], [0] * len(ranks))
    for place, rank in enumerate(ranks):
        tiles = by_rank.get(rank, ())
        packing.tiles.extend(tiles)
        packing.elements[place] = sum(tile.numel for tile in tiles)
    return packing
