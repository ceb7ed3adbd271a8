"""Shards to owners and back: carries out the plan of `owners.py`.

The tiles of a bucket's matrices travel to their owners in one all-to-all and are orthogonalised
there. The results travel back in another. Under HSDP each replica does its share, and an all-gather
passes the results on to the others.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from torchmars.optim.matrices import MatrixShape, Unit
from torchmars.optim.meshes import MeshGroups, mesh_place
from torchmars.optim.orthogonalize import Orthogonalizer
from torchmars.optim.owners import plan_buckets
from torchmars.optim.precision import multiplies_bfloat16, resolve_matrix_dtype, wire_and_product
from torchmars.optim.same_plan import check_same_plan
from torchmars.optim.tensors import flat_slices, local_part
from torchmars.optim.tiles import Bucket, Tile, rank_bucket

# Its name before torch 2.13 is the second one.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
BATCH_ELEMENTS = 2**24  # orthogonalised at once: enough to fill a device, little beside the model

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
        """Write what is to be orthogonalised to the values of each tile."""

    def apply(self, tiles: Sequence[MatrixTile]) -> None:
        """Take the results, the values of each tile."""


# For each parameter with a gradient its group, and its number there.
Places = dict[Tensor, tuple[Matrices, int]]


class MatrixTraffic:
    """The matrix parameters that lie alike on one mesh: their plan and their traffic.

    They are sharded over the same axes. Creating an object is collective over the ranks of the
    mesh. `matrix_dtype` is what was asked for: "auto" is resolved here, the same on every rank.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        shapes: Sequence[MatrixShape],
        orthogonalizer: Orthogonalizer,
        loads: OwnerLoads,
        groups: MeshGroups,
        matrix_dtype: str,
    ) -> None:
        self.parameters, self.shapes = parameters, shapes
        self.orthogonalize = orthogonalizer
        self.device = local_part(parameters[0]).device
        self.place = mesh_place(parameters[0], groups)
        placements = [tuple(p.placements) if isinstance(p, DTensor) else () for p in parameters]
        # Ranks outside of this mesh do not know this load: each set of ranks counts on its own.
        ranks = self.place.ranks
        plan = plan_buckets(
            shapes, orthogonalizer.flops, ranks, loads.setdefault(tuple(sorted(ranks)), {})
        )
        self.buckets = [rank_bucket(assigned, shapes, placements, self.place) for assigned in plan]
        descriptions = [
            f"of shape {shape.shape}, flatten {shape.flatten}, split {shape.split}, placed {placed}"
            for shape, placed in zip(shapes, placements)
        ]
        native_bfloat16 = check_same_plan(
            descriptions,
            plan,
            matrix_dtype,
            multiplies_bfloat16(self.device),
            self.place.groups,
            self.device,
        )
        self.matrix_dtype = resolve_matrix_dtype(matrix_dtype, native_bfloat16)
        self.wire, self.product = wire_and_product(self.matrix_dtype)

    @property
    def travels(self) -> bool:
        """Whether anything is sent: not with one shard and one replica."""
        return len(self.place.ranks) > 1

    def read(self, tiles: Sequence[Tile], values: Sequence[Tensor], places: Places) -> None:
        """Write the inputs of tiles to flat `values`: zeros where a matrix has no gradient."""
        groups, without_gradient = self._by_group(tiles, values, places)
        for matrices, of_group in groups.items():
            matrices.read(of_group)
        for target in without_gradient:
            target.zero_()

    def apply(self, tiles: Sequence[Tile], values: Sequence[Tensor], places: Places) -> None:
        """Step along the directions of tiles, flat `values`, where a matrix has a gradient."""
        groups, _ = self._by_group(tiles, values, places)
        for matrices, of_group in groups.items():
            matrices.apply(of_group)

    def _by_group(
        self, tiles: Sequence[Tile], values: Sequence[Tensor], places: Places
    ) -> tuple[dict[Matrices, list[MatrixTile]], list[Tensor]]:
        """Return the tiles of matrices that have a gradient, and the values of the others.

        Those of a group are sorted by length, as `run_kernel` likes them.
        """
        groups: dict[Matrices, list[MatrixTile]] = {}
        without_gradient = []
        for tile, of_tile in sorted(zip(tiles, values), key=lambda pair: pair[0].numel):
            place = places.get(self.parameters[tile.unit.parameter])
            if place is None:
                without_gradient.append(of_tile)
            else:
                groups.setdefault(place[0], []).append(MatrixTile(place[1], tile, of_tile))
        return groups, without_gradient

    def compute_here(self, bucket: Bucket, places: Places) -> None:
        """Orthogonalise a bucket of matrices where they are: nothing travels."""
        tile_of = {tile.unit: tile for tile in bucket.incoming[0]}
        for units in batches(bucket.owned):
            shape = len(units), units[0].rows, units[0].cols
            inputs = torch.empty(shape, dtype=self.wire, device=self.device)
            tiles = [tile_of[unit] for unit in units]
            self.read(tiles, _cut(inputs, tiles), places)
            directions = self.orthogonalize(inputs, self.product).contiguous()
            self.apply(tiles, _cut(directions, tiles), places)

    def send(self, bucket: Bucket, places: Places) -> "Transfer":
        """Send this rank's tiles of what is orthogonalised to their owners."""
        tiles = [tile for tiles in bucket.outgoing for tile in tiles]
        elements = sum(tile.numel for tile in tiles)
        packed = torch.empty(elements, dtype=self.wire, device=self.device)
        self.read(tiles, _cut(packed, tiles), places)
        return self._all_to_all(packed, bucket.outgoing, bucket.incoming)

    def compute(self, bucket: Bucket, arrived: Tensor) -> "Transfer":
        """Orthogonalise the units that this rank owns, and send the results back."""
        incoming = [tile for tiles in bucket.incoming for tile in tiles]
        parts: dict[Unit, list[tuple[Tile, Tensor]]] = {}
        for tile, part in zip(incoming, arrived.split([tile.numel for tile in incoming])):
            parts.setdefault(tile.unit, []).append((tile, part))

        def paired(units: list[Unit], matrices: Tensor) -> tuple[list[Tensor], list[Tensor]]:
            """Return the parts of `matrices`, and what has arrived of each, in its shape."""
            of_matrices, arrived = [], []
            for unit, matrix in zip(units, matrices):
                for tile, part in parts[unit]:
                    of_matrices.append(matrix[tile.in_unit])
                    arrived.append(part.view(of_matrices[-1].shape))
            return of_matrices, arrived

        for units in batches(bucket.owned):
            matrices = arrived.new_empty(len(units), units[0].rows, units[0].cols)
            torch._foreach_copy_(*paired(units, matrices))
            directions, arrived_parts = paired(units, self.orthogonalize(matrices, self.product))
            # What arrived has been read: its memory takes the result.
            torch._foreach_copy_(arrived_parts, directions)
        return self._all_to_all(arrived, bucket.incoming, bucket.outgoing)

    def write_results(self, bucket: Bucket, returned: Tensor, places: Places) -> None:
        """Pass the results on to the other replicas; write this rank's tiles of all of them."""
        for values, tiles in zip(self._of_all_replicas(bucket, returned), bucket.by_replica):
            self.apply(tiles, _cut(values, tiles), places)

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

    def _all_to_all(
        self, packed: Tensor, outgoing: list[list[Tile]], incoming: list[list[Tile]]
    ) -> "Transfer":
        if self.place.shard_group is None:
            return Transfer(packed, None, packed)
        sent, received = (
            [sum(tile.numel for tile in tiles) for tiles in side] for side in (outgoing, incoming)
        )
        arriving = packed.new_empty(sum(received))
        work = dist.all_to_all_single(
            arriving, packed, received, sent, group=self.place.shard_group, async_op=True
        )
        return Transfer(arriving, work, packed)


def _cut(packed: Tensor, tiles: Sequence[Tile]) -> list[Tensor]:
    """Return the values of each tile, flat, of those that lie one after the other in `packed`."""
    ends = itertools.accumulate(tile.numel for tile in tiles)
    return flat_slices((packed, end - tile.numel, tile.numel) for tile, end in zip(tiles, ends))


def batches(units: Sequence[Unit]) -> Iterator[list[Unit]]:
    """Yield units of equal shape together, of BATCH_ELEMENTS at most."""
    by_shape: dict[tuple[int, int], list[Unit]] = {}
    for unit in units:
        by_shape.setdefault((unit.rows, unit.cols), []).append(unit)
    for (rows, cols), alike in by_shape.items():
        size = max(1, BATCH_ELEMENTS // (rows * cols))
        for first in range(0, len(alike), size):
            yield alike[first : first + size]


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


class Exchange:
    """Orthogonalises every matrix of a step, bucket by bucket.

    While bucket k is computed, bucket k + 1 travels in and k - 1 out. Other work fits between
    `start` and `finish`, while the first bucket travels. Without `overlap` every transfer is waited
    for as soon as it has started; the results are the same.
    """

    def __init__(
        self, traffic: Sequence[MatrixTraffic], groups: Sequence[Matrices], *, overlap: bool
    ) -> None:
        self.overlap = overlap
        self.places: Places = {
            parameter: (group, number)
            for group in groups
            for number, parameter in enumerate(group.parameters)
        }
        self.here = [
            (each, bucket) for each in traffic if not each.travels for bucket in each.buckets
        ]
        self.jobs = [(each, bucket) for each in traffic if each.travels for bucket in each.buckets]
        self._first: Transfer | None = None

    def start(self) -> None:
        """Compute what lies here whole, and send the first bucket of what does not."""
        for traffic, bucket in self.here:
            traffic.compute_here(bucket, self.places)
        if self.jobs:
            self._first = self._send(0)

    def finish(self) -> None:
        """Compute and send the other buckets, and write all results."""
        arriving, self._first = self._first, None  # its buffers are freed as soon as they are read
        returning: Transfer | None = None
        for number, (traffic, bucket) in enumerate(self.jobs):
            assert arriving is not None
            following = self._send(number + 1) if number + 1 < len(self.jobs) else None
            computed = self._started(traffic.compute(bucket, arriving.wait()))
            if returning is not None:
                self._write(number - 1, returning)
            arriving, returning = following, computed
        if returning is not None:
            self._write(len(self.jobs) - 1, returning)

    def _send(self, number: int) -> Transfer:
        traffic, bucket = self.jobs[number]
        return self._started(traffic.send(bucket, self.places))

    def _write(self, number: int, transfer: Transfer) -> None:
        traffic, bucket = self.jobs[number]
        traffic.write_results(bucket, transfer.wait(), self.places)

    def _started(self, transfer: Transfer) -> Transfer:
        if not self.overlap:
            transfer.wait()
        return transfer
