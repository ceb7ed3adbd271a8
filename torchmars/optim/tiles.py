"""The tiles of matrices that a rank sends, receives and computes under the plan of `owners.py`."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch.distributed.tensor.placement_types import Placement

from torchmars.optim.matrices import Block, MatrixShape, Unit
from torchmars.optim.meshes import MeshPlace


@dataclass
class Tile:
    """A rank's part of one unit: where it lies in the local shard and how long it is."""

    unit: Unit
    start: int
    """Its first element, within the local shard. The others follow: a unit has whole rows."""
    in_unit: tuple[slice, slice]
    """Within the unit's matrix."""
    numel: int


def tile_of(unit: Unit, block: Block) -> Tile | None:
    """Return the tile of `unit` in a rank's `block`, or None."""
    part = unit.overlap(block)
    if part is None:
        return None
    (b0, b1), (r0, r1), (c0, c1) = part
    (batch, _), (row, last_row), _ = block
    return Tile(
        unit,
        ((b0 - batch) * (last_row - row) + r0 - row) * (c1 - c0),
        (slice(r0 - unit.row, r1 - unit.row), slice(c0, c1)),
        (r1 - r0) * (c1 - c0),
    )


@dataclass
class Bucket:
    """What this rank sends, receives and computes for one bucket."""

    outgoing: list[list[Tile]]
    """To each rank of the shard group: this rank's tiles of the units that one owns."""
    incoming: list[list[Tile]]
    """From each rank of the shard group: its tiles of the units that this rank owns."""
    by_replica: list[list[Tile]]
    """This rank's tiles of the units that each replica owns, in the order in which they return."""
    owned: list[Unit]


def rank_bucket(
    assigned: Sequence[tuple[Unit, int]],
    shapes: Sequence[MatrixShape],
    placements: Sequence[Sequence[Placement]],
    place: MeshPlace,
) -> Bucket:
    """Return what the rank at `place` does for a bucket of units and their owners.

    The time is linear in the bucket's units, and in the rank's own units times the ranks.
    """
    shards, replicas = place.shards, place.replicas
    mesh_shape, own = place.mesh_shape, place.coordinates[place.shard]
    own_blocks = {
        number: shapes[number].block(mesh_shape, placements[number], own)
        for number in {unit.parameter for unit, _ in assigned}
    }
    bucket = Bucket([], [[] for _ in range(shards)], [], [])
    # This rank's tiles, by the replica and shard of their owner.
    tiles: list[list[list[Tile]]] = [[[] for _ in range(shards)] for _ in range(replicas)]
    for unit, owner in assigned:
        tile = tile_of(unit, own_blocks[unit.parameter])
        if tile is not None:
            tiles[owner // shards][owner % shards].append(tile)
        if (owner // shards, owner % shards) == (place.replica, place.shard):
            bucket.owned.append(unit)
            for source, coordinate in enumerate(place.coordinates):
                block = shapes[unit.parameter].block(
                    mesh_shape, placements[unit.parameter], coordinate
                )
                theirs = tile_of(unit, block)
                if theirs is not None:
                    bucket.incoming[source].append(theirs)
    bucket.outgoing = tiles[place.replica]
    bucket.by_replica = [[tile for owned in by_owner for tile in owned] for by_owner in tiles]
    return bucket
