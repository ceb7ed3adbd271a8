"""Shards to owners and back: carries out the plan of `owners.py`.

The blocks of a bucket's matrices travel to their owners in one all-to-all, are orthogonalised there, and the results
travel back in another; under HSDP each replica does its share and an all-gather passes the results on to the others.
"""

import functools
import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from torchmars.optim.norms import MeshGroups, ranks_along, sharded_dims
from torchmars.optim.orthogonalize import orthogonalize
from torchmars.optim.owners import Block, MatrixShape, Unit, plan_buckets
from torchmars.optim.precision import multiplies_bfloat16, resolve_matrix_dtype, wire_and_product

all_gather_single = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)  # its name before torch 2.13
BATCH_ELEMENTS = 2**24  # orthogonalised at once: enough to fill a device, little beside the model

# For each set of ranks that share work: global rank -> FLOPs of the matrices it owns.
OwnerLoads = dict[tuple[int, ...], dict[int, int]]


@dataclass
class Piece:
    """A rank's part of one unit: where it lies in the local shard and how long it is."""

    unit: Unit
    local: tuple[slice, slice, slice]
    """Within the local shard, seen as [batch, rows, cols]."""
    in_unit: tuple[slice, slice]
    """Within the unit's matrix."""
    numel: int


def piece_of(unit: Unit, block: Block) -> Piece | None:
    """The piece of `unit` in a rank's `block`, or None."""
    part = unit.overlap(block)
    if part is None:
        return None
    local = tuple(
        slice(start - block[dim][0], stop - block[dim][0]) for dim, (start, stop) in enumerate(part)
    )
    (r0, r1), (c0, c1) = part[1:]
    return Piece(
        unit, local, (slice(r0 - unit.row, r1 - unit.row), slice(c0, c1)), (r1 - r0) * (c1 - c0)
    )


@dataclass
class Bucket:
    """What this rank sends, receives and computes for one bucket."""

    outgoing: list[list[Piece]]
    """To each rank of the shard group: my pieces of the units it owns."""
    incoming: list[list[Piece]]
    """From each rank of the shard group: its pieces of the units I own."""
    by_replica: list[list[Piece]]
    """My pieces of the units that each replica owns, in the order in which they come back."""
    owned: list[Unit]


def rank_bucket(
    assigned: Sequence[tuple[Unit, int]],
    shapes: Sequence[MatrixShape],
    placements: Sequence[Sequence[Placement]],
    mesh_shape: Sequence[int],
    coordinates: Sequence[Sequence[int]],
    replica: int,
    shard: int,
    replicas: int,
) -> Bucket:
    """What the rank number `shard` of replica number `replica` has to do with a bucket of units and their owners.

    `coordinates` are those of the ranks of its replica. Linear in the bucket's units, and in its own units times ranks.
    """
    shards = len(coordinates)
    held = {
        number: shapes[number].block(mesh_shape, placements[number], coordinates[shard])
        for number in {unit.parameter for unit, _ in assigned}
    }
    bucket = Bucket([], [[] for _ in range(shards)], [], [])
    pieces: list[list[list[Piece]]] = [
        [[] for _ in range(shards)] for _ in range(replicas)
    ]  # mine, by owner
    for unit, owner in assigned:
        piece = piece_of(unit, held[unit.parameter])
        if piece is not None:
            pieces[owner // shards][owner % shards].append(piece)
        if (owner // shards, owner % shards) == (replica, shard):
            bucket.owned.append(unit)
            for source, coordinate in enumerate(coordinates):
                theirs = piece_of(
                    unit,
                    shapes[unit.parameter].block(
                        mesh_shape, placements[unit.parameter], coordinate
                    ),
                )
                if theirs is not None:
                    bucket.incoming[source].append(theirs)
    bucket.outgoing = pieces[replica]
    bucket.by_replica = [[piece for owned in by_owner for piece in owned] for by_owner in pieces]
    return bucket


class Sharding:
    """The matrix parameters that share a mesh and sharded dimensions: their plan and their traffic.

    Creating one is collective over the ranks of the mesh. Plain tensors share a mesh of one rank: this one.
    `matrix_dtype` is what was asked for; "auto" is resolved here, the same on every rank.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        shapes: Sequence[MatrixShape],
        loads: OwnerLoads,
        groups: MeshGroups,
        matrix_dtype: str,
    ) -> None:
        self.parameters, self.shapes = parameters, shapes
        first = parameters[0]
        self.device = (first.to_local() if isinstance(first, DTensor) else first).device
        if isinstance(first, DTensor):
            mesh = first.device_mesh
            dims = (sharded_dims(first) or (mesh, ()))[1]
            others = tuple(dim for dim in range(mesh.ndim) if dim not in dims)
            mesh_shape = tuple(mesh.shape)
            grid = torch.tensor(ranks_along(mesh, dims))  # [replicas, shards]
            me = grid.eq(dist.get_rank()).nonzero()[0]
            self.replica, self.shard = int(me[0]), int(me[1])
            self.shard_group = groups.over(mesh, dims) if grid.shape[1] > 1 else None
            self.replica_group = groups.over(mesh, others) if grid.shape[0] > 1 else None
            coordinates = [mesh.mesh.eq(rank).nonzero()[0].tolist() for rank in grid[self.replica]]
            ranks = grid.flatten().tolist()
            for group, wanted in (
                (self.shard_group, grid[self.replica]),
                (self.replica_group, grid[:, self.shard]),
            ):
                if group is not None and dist.get_process_group_ranks(group) != wanted.tolist():
                    raise ValueError("the ranks of a mesh must ascend along its dimensions")
        else:
            mesh_shape, coordinates, ranks = (), [()], [0]
            self.replica = self.shard = 0
            self.shard_group = self.replica_group = None
        self.shards, self.replicas = len(coordinates), len(ranks) // len(coordinates)
        placements = [tuple(p.placements) if isinstance(p, DTensor) else () for p in parameters]
        # Ranks outside of this mesh do not know this load: each set of ranks counts on its own.
        plan = plan_buckets(shapes, ranks, loads.setdefault(tuple(sorted(ranks)), {}))
        self.buckets = [
            rank_bucket(
                assigned,
                shapes,
                placements,
                mesh_shape,
                coordinates,
                self.replica,
                self.shard,
                self.replicas,
            )
            for assigned in plan
        ]
        fast = self._agree(plan, placements, matrix_dtype, multiplies_bfloat16(self.device))
        self.matrix_dtype = resolve_matrix_dtype(matrix_dtype, fast)
        self.wire, self.product = wire_and_product(self.matrix_dtype)

    def _agree(
        self,
        plan: list[list[tuple[Unit, int]]],
        placements: Sequence[Sequence[Placement]],
        matrix_dtype: str,
        fast: bool,
    ) -> bool:
        """Whether all ranks are `fast`.

        Raises `RuntimeError`, on all ranks, where they planned differently: a step would hang. Raises
        `ValueError` likewise where they were given another `matrix_dtype`.
        """
        groups = [group for group in (self.shard_group, self.replica_group) if group is not None]
        if not groups:
            return fast
        facts = [
            f"of shape {shape.shape}, flatten {shape.flatten}, split {shape.split}, placed {placed}"
            for shape, placed in zip(self.shapes, placements)
        ]
        same = [fingerprint(repr((facts, plan))), fingerprint(matrix_dtype)]
        values = torch.tensor([*same, *(-value for value in same), fast], device=self.device)
        for group in groups:  # of shards, then of replicas: all ranks of the mesh know, none waits
            dist.all_reduce(values, op=dist.ReduceOp.MIN, group=group)
        plan_low, dtype_low, plan_high, dtype_high, all_fast = values.tolist()
        if plan_low != -plan_high:
            raise RuntimeError(
                "the ranks do not hold the same parameters in the same order: "
                + first_difference(gather_facts(facts, groups))
            )
        if dtype_low != -dtype_high:
            raise ValueError("matrix_dtype must be the same on all ranks, they were given several")
        return bool(all_fast)

    def zeros(self, piece: Piece) -> Tensor:
        """What a parameter without a gradient sends."""
        return torch.zeros((), device=self.device).expand(
            [part.stop - part.start for part in piece.local]
        )

    def compute_here(
        self,
        bucket: Bucket,
        read: Callable[[int, Piece], Tensor],
        write: Callable[[int, Piece, Tensor], None],
    ) -> None:
        """Orthogonalise a bucket of whole matrices where they are: with one shard and one replica nothing travels."""
        pieces = {piece.unit: piece for piece in bucket.incoming[0]}
        for units in batches(bucket.owned):
            shape = len(units), units[0].rows, units[0].cols
            matrices = torch.empty(shape, dtype=self.wire, device=self.device)
            for unit, matrix in zip(units, matrices):
                matrix.copy_(read(unit.parameter, pieces[unit])[0])
            for unit, matrix in zip(units, orthogonalize(matrices, self.product)):
                write(unit.parameter, pieces[unit], matrix[None])

    def start(self, bucket: Bucket, read: Callable[[int, Piece], Tensor]) -> "Transfer":
        """Send my pieces of the Newton–Schulz input, which `read(parameter, piece)` gives, to their owners."""
        pieces = [piece for pieces in bucket.outgoing for piece in pieces]
        sizes = [piece.numel for piece in pieces]
        packed = torch.empty(sum(sizes), dtype=self.wire, device=self.device)
        for part, piece in zip(packed.split(sizes), pieces):
            values = read(piece.unit.parameter, piece)
            part.view(values.shape).copy_(values)
        return self._all_to_all(packed, bucket.outgoing, bucket.incoming)

    def compute(self, bucket: Bucket, arrived: Tensor) -> "Transfer":
        """Orthogonalise the units this rank owns, equal shapes in batches, and send the results back."""
        incoming = [piece for pieces in bucket.incoming for piece in pieces]
        parts: dict[Unit, list[tuple[Piece, Tensor]]] = {}
        for piece, part in zip(incoming, arrived.split([piece.numel for piece in incoming])):
            parts.setdefault(piece.unit, []).append((piece, part))
        for units in batches(bucket.owned):
            matrices = arrived.new_empty(len(units), units[0].rows, units[0].cols)
            for unit, matrix in zip(units, matrices):
                for piece, part in parts[unit]:
                    place = matrix[piece.in_unit]
                    place.copy_(part.view(place.shape))
            for unit, matrix in zip(units, orthogonalize(matrices, self.product)):
                for piece, part in parts[
                    unit
                ]:  # what arrived has been read: its memory takes the result
                    place = matrix[piece.in_unit]
                    part.view(place.shape).copy_(place)
        return self._all_to_all(arrived, bucket.incoming, bucket.outgoing)

    def finish(self, bucket: Bucket, returned: Tensor) -> Iterator[tuple[Piece, Tensor]]:
        """Pass the results on to the other replicas; then my pieces of every unit's result, [1, rows, cols] each."""
        counts = [sum(piece.numel for piece in pieces) for pieces in bucket.by_replica]
        gathered = [returned]
        if self.replica_group is not None:
            padded = returned.new_zeros(max(counts))
            padded[: len(returned)] = returned
            everyone = returned.new_empty(self.replicas * max(counts))
            all_gather_single(everyone, padded, group=self.replica_group)
            gathered = [
                part[:count]
                for part, count in zip(
                    everyone.split(max(counts)) if max(counts) else [everyone] * len(counts), counts
                )
            ]
        for values, pieces in zip(gathered, bucket.by_replica):
            for part, piece in zip(values.split([piece.numel for piece in pieces]), pieces):
                rows, cols = piece.local[1], piece.local[2]
                yield piece, part.view(1, rows.stop - rows.start, cols.stop - cols.start)

    def _all_to_all(
        self, packed: Tensor, outgoing: list[list[Piece]], incoming: list[list[Piece]]
    ) -> "Transfer":
        if self.shard_group is None:
            return Transfer(packed, None, packed)
        sent, received = (
            [sum(piece.numel for piece in pieces) for pieces in side]
            for side in (outgoing, incoming)
        )
        arriving = packed.new_empty(sum(received))
        work = dist.all_to_all_single(
            arriving, packed, received, sent, group=self.shard_group, async_op=True
        )
        return Transfer(arriving, work, packed)


def fingerprint(text: str) -> int:
    """A number of 56 bits that other texts do not have."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


def gather_facts(facts: list[str], groups: Sequence[dist.ProcessGroup]) -> dict[int, list[str]]:
    """The facts of every rank of a mesh, by rank; `groups` are those of its shards and replicas."""
    gathered = {dist.get_rank(): facts}
    for group in groups:
        everyone: list[dict[int, list[str]]] = [{}] * dist.get_world_size(group)
        dist.all_gather_object(everyone, gathered, group=group)
        gathered = {rank: theirs for each in everyone for rank, theirs in each.items()}
    return gathered


def first_difference(facts: dict[int, list[str]]) -> str:
    """Where the matrix parameters of two ranks first differ; `facts` has those of each rank."""
    first, *others = sorted(facts)
    for other in others:
        pairs = itertools.zip_longest(facts[first], facts[other], fillvalue="missing")
        for number, (here, there) in enumerate(pairs):
            if here != there:
                return (
                    f"matrix parameter number {number} of their mesh is {here} on rank {first} "
                    f"and {there} on rank {other}"
                )
    return "their plans differ all the same: install the same version on all machines"


def batches(units: Sequence[Unit]) -> Iterator[list[Unit]]:
    """Units of equal shape together, of BATCH_ELEMENTS at most."""
    by_shape: dict[tuple[int, int], list[Unit]] = {}
    for unit in units:
        by_shape.setdefault((unit.rows, unit.cols), []).append(unit)
    for (rows, cols), alike in by_shape.items():
        size = max(1, BATCH_ELEMENTS // (rows * cols))
        for first in range(0, len(alike), size):
            yield alike[first : first + size]


@dataclass
class Transfer:
    """Values under way, and the buffer they were sent from, which must live until they have arrived."""

    values: Tensor
    work: dist.Work | None
    sent_from: Tensor

    def wait(self) -> Tensor:
        if self.work is not None:
            self.work.wait()
        return self.values


def run(
    shardings: Sequence[Sharding],
    read: Callable[[Sharding, int, Piece], Tensor],
    write: Callable[[Sharding, int, Piece, Tensor], None],
    meanwhile: Callable[[], None],
    *,
    overlap: bool = True,
) -> None:
    """Orthogonalise every matrix of `shardings`, bucket by bucket.

    While bucket k is computed, bucket k + 1 travels in and k - 1 out; `meanwhile` runs while the first one travels.
    `read(sharding, parameter, piece)` gives the input [1, rows, cols] of a piece of this rank's shards, and `write` takes the
    result of one. Without `overlap` every transfer is waited for as soon as it has started; the results are the same.
    """

    def under_way(transfer: Transfer) -> Transfer:
        if not overlap:
            transfer.wait()
        return transfer

    def start(job: tuple[Sharding, Bucket]) -> Transfer:
        sharding, bucket = job
        return under_way(sharding.start(bucket, functools.partial(read, sharding)))

    def finish(job: tuple[Sharding, Bucket], transfer: Transfer) -> None:
        sharding, bucket = job
        for piece, values in sharding.finish(bucket, transfer.wait()):
            write(sharding, piece.unit.parameter, piece, values)

    jobs = []
    for sharding in shardings:
        if sharding.shards * sharding.replicas > 1:
            jobs += [(sharding, bucket) for bucket in sharding.buckets]
            continue
        for bucket in sharding.buckets:
            sharding.compute_here(
                bucket, functools.partial(read, sharding), functools.partial(write, sharding)
            )
    arriving = start(jobs[0]) if jobs else None
    meanwhile()
    returning: Transfer | None = None
    for number, (sharding, bucket) in enumerate(jobs):
        following = start(jobs[number + 1]) if number + 1 < len(jobs) else None
        computed = under_way(sharding.compute(bucket, arriving.wait()))
        if returning is not None:
            finish(jobs[number - 1], returning)
        arriving, returning = following, computed
    if returning is not None:
        finish(jobs[-1], returning)
