"""Shards to owners and back: carries out the plan of `owners.py`.

The tiles of a bucket's matrices travel to their owners in one all-to-all and become directions
there, which travel back in another. Matrices that lie whole on their owners' shards stay there.
Under HSDP each replica does its share, and an all-gather passes the results on to the others.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from torchmars.optim.matrices.buckets import Bucket, Packing, rank_bucket
from torchmars.optim.matrices.directions import Directions
from torchmars.optim.matrices.orthogonalize import ORTHOGONALIZERS
from torchmars.optim.matrices.owners import plan_buckets
from torchmars.optim.matrices.pieces import Pieces, batches, by_shape
from torchmars.optim.matrices.precision import multiplies_bfloat16, resolve_matrix_dtype
from torchmars.optim.matrices.same_plan import check_same_plan, on_all_ranks
from torchmars.optim.matrices.shapes import MatrixShape, Units
from torchmars.optim.matrices.tiles import Tile, blocks_of_shards
from torchmars.optim.meshes import MeshGroups, mesh_place
from torchmars.optim.tensors import flat_slices, local_part

# Its name before torch 2.13 is the second one.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

# Elements that are orthogonalised at once: enough to fill a GPU, little beside the model. On a CPU
# as many for each thread as stay in the cache of a core while they are multiplied.
BATCH_ELEMENTS = 2**24
BATCH_OF_CPU_THREAD = 2**19

# For each set of ranks that share work: global rank -> FLOPs of the matrices it owns.
OwnerLoads = dict[tuple[int, ...], dict[int, int]]


class MatrixTile(NamedTuple):
    """A tile of a matrix that has a gradient, and its values: those sent, or those computed."""

    number: int
    """The matrix's, among the `parameters` of its `Matrices`."""
    tile: Tile
    values: Tensor
    """Flat."""


class Matrices(Protocol):
    """The matrices of a group that an exchange reads its inputs from and writes its results to."""

    parameters: list[Tensor]
    """Those that have a gradient."""

    def read(self, tiles: Sequence[MatrixTile]) -> None:
        """Write the input of the orthogonalisation to the values of each tile."""

    def apply(self, tiles: Sequence[MatrixTile]) -> None:
        """Step along the directions, the values of each tile."""


# For each parameter with a gradient its group, and its number there.
Places = dict[Tensor, tuple[Matrices, int]]


@dataclass
class Transfer:
    """Values that travel, and the buffer they are sent from, which must live until they arrive."""

    values: Tensor
    work: dist.Work | None
    sent_from: Tensor

    def wait(self) -> Tensor:
        """Wait until the values have arrived, and return them."""
        if self.work is not None:
            self.work.wait()
        return self.values


class MatrixTraffic:
    """The matrix parameters that lie alike on one mesh: their plan and their traffic.

    They are sharded over the same axes. Creating an object is collective over the ranks of the
    mesh. `matrix_dtype` is the setting: "auto" is resolved here, the same on every rank.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        shapes: Sequence[MatrixShape],
        directions: Directions,
        loads: OwnerLoads,
        groups: MeshGroups,
        matrix_dtype: str,
    ) -> None:
        self.parameters = parameters
        self.directions = directions
        self.device = local_part(parameters[0]).device
        self.place = mesh_place(parameters[0], groups)
        placements = [tuple(p.placements) if isinstance(p, DTensor) else () for p in parameters]
        found = zip(shapes, blocks_of_shards(shapes, placements, self.place))
        self.shapes, blocks = zip(*(shape.as_stack(of_shards) for shape, of_shards in found))
        native_bfloat16 = on_all_ranks(
            multiplies_bfloat16(self.device), self.place.groups, self.device
        )
        self.dtype: torch.dtype = getattr(
            torch, resolve_matrix_dtype(matrix_dtype, native_bfloat16)
        )
        # Ranks outside of this mesh do not know this load: each set of ranks counts on its own.
        ranks = self.place.ranks
        plan = plan_buckets(
            self.shapes,
            blocks,
            ORTHOGONALIZERS[directions.orthogonalize].flops,
            ranks,
            loads.setdefault(tuple(sorted(ranks)), {}),
        )
        decided = (shapes, placements, plan, matrix_dtype, directions)
        check_same_plan(decided, self.place.groups, self.device)
        self.buckets = [rank_bucket(planned, blocks, self.place) for planned in plan]

    def compute_here(self, bucket: Bucket, places: Places) -> None:
        """Make the directions of a bucket of matrices where they are: nothing travels."""
        for tiles, directions in self._at_home(bucket, places):
            self._apply(tiles, directions, places)

    def send(self, bucket: Bucket, places: Places) -> Transfer:
        """Send this rank's tiles to orthogonalise to their owners; nothing, at home."""
        packed = self._read(bucket.outgoing.tiles, places)
        if bucket.home:  # it has none
            return Transfer(packed, None, packed)
        return self._all_to_all(packed, bucket.outgoing, bucket.incoming)

    def compute(self, bucket: Bucket, arrived: Tensor, places: Places) -> Transfer:
        """Make the directions of the units that this rank owns, and send them back."""
        if bucket.home:
            directions = [each.flatten() for _, each in self._at_home(bucket, places)]
            flat = torch.cat([arrived, *directions])
            return Transfer(flat, None, flat)
        pieces = Pieces(bucket, arrived)
        for (rows, cols), alike in by_shape(bucket.owned).items():
            self._replace_by_directions(alike, pieces.put_together(alike, rows, cols))
            pieces.take_apart()
        return self._all_to_all(arrived, bucket.incoming, bucket.outgoing)

    def _replace_by_directions(self, alike: Sequence[Units], momenta: Tensor) -> None:
        """Turn momenta [n, rows, cols] into directions."""
        size = max(1, self._batch_elements // math.prod(momenta.shape[1:]))
        for some in momenta.split(size):
            some.copy_(self._directions(alike[0], some))

    def _directions(self, units: Units, momenta: Tensor) -> Tensor:
        """Return the directions [n, rows, cols] of a batch of momenta, which are cut as `units`."""
        shape = self.shapes[units.parameter]
        parts = [
            self.directions.scaled(self.directions.orthogonalized(each), momenta.shape[1:])
            for each in shape.cut(momenta)
        ]
        return shape.put_together(parts).to(momenta.dtype)

    def write_results(self, bucket: Bucket, returned: Tensor, places: Places) -> None:
        """Pass the results on to the other replicas; write this rank's tiles of all of them."""
        for values, tiles in zip(self._of_all_replicas(bucket, returned), bucket.by_replica):
            self._apply(tiles, values, places)

    def _at_home(self, bucket: Bucket, places: Places) -> Iterator[tuple[list[Tile], Tensor]]:
        """Yield the tiles of this rank's matrices at home, in order, with their directions."""
        for tiles in batches(bucket.by_replica[self.place.replica], self._batch_elements):
            momenta = self._read(tiles, places).view(-1, *tiles[0].units.shape)
            yield tiles, self._directions(tiles[0].units, momenta).contiguous()

    @property
    def _batch_elements(self) -> int:
        """The elements that are orthogonalised at once."""
        on_cpu = self.device.type == "cpu"
        return BATCH_OF_CPU_THREAD * torch.get_num_threads() if on_cpu else BATCH_ELEMENTS

    def _read(self, tiles: Sequence[Tile], places: Places) -> Tensor:
        """Return the output of `Matrices.read` for tiles: zeros where a matrix has no gradient."""
        elements = sum(tile.numel for tile in tiles)
        packed = torch.empty(elements, dtype=self.dtype, device=self.device)
        groups, without_gradient = self._by_group(tiles, packed, places)
        for matrices, of_group in groups.items():
            matrices.read(of_group)
        for target in without_gradient:
            target.zero_()
        return packed

    def _apply(self, tiles: Sequence[Tile], packed: Tensor, places: Places) -> None:
        """Take the results of tiles, `packed`, where a matrix has a gradient."""
        groups, _ = self._by_group(tiles, packed, places)
        for matrices, of_group in groups.items():
            matrices.apply(of_group)

    def _by_group(
        self, tiles: Sequence[Tile], packed: Tensor, places: Places
    ) -> tuple[dict[Matrices, list[MatrixTile]], list[Tensor]]:
        """Return the tiles of matrices that have a gradient, and the values of the others.

        Their values lie one after the other in `packed`. Those of a group are sorted by length, as
        `run_kernel` likes them.
        """
        groups: dict[Matrices, list[MatrixTile]] = {}
        without_gradient = []
        ends = itertools.accumulate(tile.numel for tile in tiles)
        values = flat_slices(
            (packed, end - tile.numel, tile.numel) for tile, end in zip(tiles, ends)
        )
        for tile, of_tile in sorted(zip(tiles, values), key=lambda pair: pair[0].numel):
            place = places.get(self.parameters[tile.units.parameter])
            if place is None:
                without_gradient.append(of_tile)
            else:
                groups.setdefault(place[0], []).append(MatrixTile(place[1], tile, of_tile))
        return groups, without_gradient

    def _of_all_replicas(self, bucket: Bucket, returned: Tensor) -> list[Tensor]:
        """Return this rank's results from the owners in each replica; its own gave `returned`."""
        if self.place.replica_group is None:
            return [returned]
        counts = [sum(tile.numel for tile in tiles) for tiles in bucket.by_replica]
        longest = max(counts)
        padded = returned.new_zeros(longest)
        padded[: len(returned)] = returned
        everyone = returned.new_empty(self.place.replicas * longest)
        all_gather_single(everyone, padded, group=self.place.replica_group)
        rows = everyone.view(self.place.replicas, longest).unbind()
        return [row[:count] for row, count in zip(rows, counts)]

    def _all_to_all(self, packed: Tensor, outgoing: Packing, incoming: Packing) -> Transfer:
        if self.place.shard_group is None:
            return Transfer(packed, None, packed)
        arriving = packed.new_empty(sum(incoming.elements))
        work = dist.all_to_all_single(
            arriving,
            packed,
            incoming.elements,
            outgoing.elements,
            group=self.place.shard_group,
            async_op=True,
        )
        return Transfer(arriving, work, packed)
