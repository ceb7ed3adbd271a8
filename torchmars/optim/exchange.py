"""Shards to owners and back: carries out the plan of `owners.py`.

The tiles of a bucket's matrices travel to their owners in one all-to-all and are orthogonalised
there. The results travel back in another. Under HSDP each replica does its share, and an all-gather
passes the results on to the others.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

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
from torchmars.optim.tensors import local_part
from torchmars.optim.tiles import Bucket, Slices, Tile, rank_bucket

# Its name before torch 2.13 is the second one.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
BATCH_ELEMENTS = 2**24  # orthogonalised at once: enough to fill a device, little beside the model

# For each set of ranks that share work: global rank -> FLOPs of the matrices it owns.
OwnerLoads = dict[tuple[int, ...], dict[int, int]]


class Matrices(Protocol):
    """The matrices of a group that an exchange reads its inputs from and writes its results to."""

    parameters: list[Tensor]
    """Those that have a gradient."""

    def direction_input(self, number: int, shape: MatrixShape, place: Slices) -> Tensor:
        """Return the input [1, rows, cols] for a place in the local shard of a parameter."""

    def apply_direction(
        self, number: int, shape: MatrixShape, tile: Tile, direction: Tensor
    ) -> None:
        """Take the result [1, rows, cols] of a tile of a parameter."""


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

    def read(self, tile: Tile, places: Places) -> Tensor:
        """Return the input [1, rows, cols] of a tile: zeros where a matrix has no gradient."""
        number = tile.unit.parameter
        if self.parameters[number] not in places:
            shape = [part.stop - part.start for part in tile.local]
            return torch.zeros((), device=self.device).expand(shape)
        matrices, place = places[self.parameters[number]]
        return matrices.direction_input(place, self.shapes[number], tile.local)

    def write(self, tile: Tile, places: Places, direction: Tensor) -> None:
        """Step along the direction [1, rows, cols] of a tile, where a matrix has a gradient."""
        number = tile.unit.parameter
        if self.parameters[number] in places:
            matrices, place = places[self.parameters[number]]
            matrices.apply_direction(place, self.shapes[number], tile, direction)

    def compute_here(self, bucket: Bucket, places: Places) -> None:
        """Orthogonalise a bucket of matrices where they are: nothing travels."""
        tiles = {tile.unit: tile for tile in bucket.incoming[0]}
        for units in batches(bucket.owned):
            shape = len(units), units[0].rows, units[0].cols
            inputs = torch.empty(shape, dtype=self.wire, device=self.device)
            for unit, matrix in zip(units, inputs):
                matrix.copy_(self.read(tiles[unit], places)[0])
            for unit, matrix in zip(units, self.orthogonalize(inputs, self.product)):
                self.write(tiles[unit], places, matrix[None])

    def send(self, bucket: Bucket, places: Places) -> "Transfer":
        """Send this rank's tiles of what is orthogonalised to their owners."""
        tiles = [tile for tiles in bucket.outgoing for tile in tiles]
        sizes = [tile.numel for tile in tiles]
        packed = torch.empty(sum(sizes), dtype=self.wire, device=self.device)
        for part, tile in zip(packed.split(sizes), tiles):
            values = self.read(tile, places)
            part.view(values.shape).copy_(values)
        return self._all_to_all(packed, bucket.outgoing, bucket.incoming)

    def compute(self, bucket: Bucket, arrived: Tensor) -> "Transfer":
        """Orthogonalise the units that this rank owns, and send the results back."""
        incoming = [tile for tiles in bucket.incoming for tile in tiles]
        parts: dict[Unit, list[tuple[Tile, Tensor]]] = {}
        for tile, part in zip(incoming, arrived.split([tile.numel for tile in incoming])):
            parts.setdefault(tile.unit, []).append((tile, part))
        for units in batches(bucket.owned):
            matrices = arrived.new_empty(len(units), units[0].rows, units[0].cols)
            for unit, matrix in zip(units, matrices):
                for tile, part in parts[unit]:
                    place = matrix[tile.in_unit]
                    place.copy_(part.view(place.shape))
            for unit, matrix in zip(units, self.orthogonalize(matrices, self.product)):
                # What arrived has been read: its memory takes the result.
                for tile, part in parts[unit]:
                    place = matrix[tile.in_unit]
                    part.view(place.shape).copy_(place)
        return self._all_to_all(arrived, bucket.incoming, bucket.outgoing)

    def write_results(self, bucket: Bucket, returned: Tensor, places: Places) -> None:
        """Pass the results on to the other replicas; write this rank's tiles of all of them."""
        for values, tiles in zip(self._of_all_replicas(bucket, returned), bucket.by_replica):
            for part, tile in zip(values.split([tile.numel for tile in tiles]), tiles):
                rows, cols = tile.local[1], tile.local[2]
                direction = part.view(1, rows.stop - rows.start, cols.stop - cols.start)
                self.write(tile, places, direction)

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
