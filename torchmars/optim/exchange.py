"""Shards to owners and back: carries out the plan of `owners.py`.

The tiles of a bucket's matrices travel to their owners in one all-to-all and are orthogonalised
there. The results travel back in another. Matrices that lie whole on their owners' shards stay
there. Under HSDP each replica does its share, and an all-gather passes the results on to the
others.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from torchmars.optim.buckets import Bucket, Packing, rank_bucket
from torchmars.optim.matrices import MatrixShape, Units
from torchmars.optim.meshes import MeshGroups, mesh_place
from torchmars.optim.orthogonalize import Orthogonalizer
from torchmars.optim.owners import plan_buckets
from torchmars.optim.precision import multiplies_bfloat16, resolve_matrix_dtype, wire_and_product
from torchmars.optim.same_plan import check_same_plan
from torchmars.optim.tensors import flat_slices, local_part
from torchmars.optim.tiles import Tile, blocks_of_shards

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
        blocks = blocks_of_shards(shapes, placements, self.place)
        # Ranks outside of this mesh do not know this load: each set of ranks counts on its own.
        ranks = self.place.ranks
        plan = plan_buckets(
            shapes, blocks, orthogonalizer.flops, ranks, loads.setdefault(tuple(sorted(ranks)), {})
        )
        self.buckets = [rank_bucket(planned, blocks, self.place) for planned in plan]
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
            place = places.get(self.parameters[tile.units.parameter])
            if place is None:
                without_gradient.append(of_tile)
            else:
                groups.setdefault(place[0], []).append(MatrixTile(place[1], tile, of_tile))
        return groups, without_gradient

    def compute_here(self, bucket: Bucket, places: Places) -> None:
        """Orthogonalise a bucket of matrices where they are: nothing travels."""
        for tiles, directions in self._directions(bucket, places):
            self.apply(tiles, _cut(directions, tiles), places)

    def _directions(self, bucket: Bucket, places: Places) -> Iterator[tuple[list[Tile], Tensor]]:
        """Yield the orthogonalised matrices of this rank that are at home, in order: batches."""
        for tiles in batches(bucket.by_replica[self.place.replica], self._batch_elements):
            shape = sum(tile.length for tile in tiles), *tiles[0].units.shape
            inputs = torch.empty(shape, dtype=self.wire, device=self.device)
            self.read(tiles, _cut(inputs, tiles), places)
            yield tiles, self.orthogonalize(inputs, self.product).contiguous()

    @property
    def _batch_elements(self) -> int:
        """The elements that are orthogonalised at once."""
        on_cpu = self.device.type == "cpu"
        return BATCH_OF_CPU_THREAD * torch.get_num_threads() if on_cpu else BATCH_ELEMENTS

    def send(self, bucket: Bucket, places: Places) -> "Transfer":
        """Send this rank's tiles of what is orthogonalised to their owners; nothing, at home."""
        elements = sum(bucket.outgoing.elements)
        packed = torch.empty(elements, dtype=self.wire, device=self.device)
        if bucket.home:
            return Transfer(packed, None, packed)
        tiles = bucket.outgoing.tiles
        self.read(tiles, _cut(packed, tiles), places)
        return self._all_to_all(packed, bucket.outgoing, bucket.incoming)

    def compute(self, bucket: Bucket, arrived: Tensor, places: Places) -> "Transfer":
        """Orthogonalise the units that this rank owns, and send the results back."""
        if bucket.home:
            of_batches = [each.flatten() for _, each in self._directions(bucket, places)]
            directions = torch.cat([arrived, *of_batches])
            return Transfer(directions, None, directions)
        parts: dict[Units, list[tuple[Tile, Tensor]]] = {}
        tiles = bucket.incoming.tiles
        for tile, part in zip(tiles, arrived.split([tile.numel for tile in tiles])):
            parts.setdefault(tile.units, []).append((tile, part))
        for (rows, cols), alike in by_shape(bucket.owned).items():
            lengths = [units.length for units in alike]
            matrices = arrived.new_empty(sum(lengths), rows, cols)
            of_matrices, arrived_parts = [], []
            for units, slab in zip(alike, matrices.split(lengths)):
                for tile, part in parts[units]:
                    some = slice(tile.first, tile.first + tile.length)
                    of_matrices.append(slab[some, tile.rows, tile.cols])
                    arrived_parts.append(part.view(of_matrices[-1].shape))
            torch._foreach_copy_(of_matrices, arrived_parts)
            for batch in matrices.split(max(1, self._batch_elements // (rows * cols))):
                batch.copy_(self.orthogonalize(batch, self.product))
            # What arrived has been read: its memory takes the result.
            torch._foreach_copy_(arrived_parts, of_matrices)
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

    def _all_to_all(self, packed: Tensor, outgoing: Packing, incoming: Packing) -> "Transfer":
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


def _cut(packed: Tensor, tiles: Sequence[Tile]) -> list[Tensor]:
    """Return the values of each tile, flat, of those that lie one after the other in `packed`."""
    ends = itertools.accumulate(tile.numel for tile in tiles)
    return flat_slices((packed, end - tile.numel, tile.numel) for tile, end in zip(tiles, ends))


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
        every = [(each, bucket) for each in traffic for bucket in each.buckets]
        self.here = [(each, bucket) for each, bucket in every if not bucket.travels]
        self.jobs = [(each, bucket) for each, bucket in every if bucket.travels]
        self._first: Transfer | None = None

    def start(self) -> None:
        """Send the first bucket of what travels, and compute what does not."""
        if self.jobs:
            self._first = self._send(0)
        for traffic, bucket in self.here:
            traffic.compute_here(bucket, self.places)

    def finish(self) -> None:
        """Compute and send the other buckets, and write all results."""
        arriving, self._first = self._first, None  # its buffers are freed as soon as they are read
        returning: Transfer | None = None
        for number, (traffic, bucket) in enumerate(self.jobs):
            assert arriving is not None
            following = self._send(number + 1) if number + 1 < len(self.jobs) else None
            computed = self._started(traffic.compute(bucket, arriving.wait(), self.places))
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
