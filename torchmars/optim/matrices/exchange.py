"""One step's way of the matrices: read, sent to their owners, computed, returned, written.

Under HSDP each replica does its share, and an all-gather passes the directions on to the others.
Nothing is computed from a part, so each direction has the same bits on any layout.
"""

import itertools
import math
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from torchmars.optim.matrices.agreement import agreed_dtype, check_same_plan
from torchmars.optim.matrices.orthogonal import ORTHOGONALIZERS, Directions
from torchmars.optim.matrices.owners import Bucket, plan_buckets, rank_bucket
from torchmars.optim.matrices.shapes import Block, MatrixShape, Units, extents_of_shards
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


class BlockOf(NamedTuple):
    """A rank's block of a matrix, and its values, flat: those to send, or a direction."""

    number: int  # the parameter's, in its group of the step
    start: int  # its first element, within the rank's part of the parameter
    shape: tuple[int, int]  # the whole matrix's
    values: Tensor


class Ends(NamedTuple):
    """Where the way of the matrices begins and ends: in the passes of a step."""

    pack: Callable[[int, Sequence[BlockOf]], None]
    """Writes what is to be orthogonalised to the values of blocks of a group, by its number."""
    step_along: Callable[[int, Sequence[BlockOf]], None]  # directions, the values of blocks
    places: dict[Tensor, tuple[int, int]]
    """Of each parameter with a gradient the number of its group of the step, and its own there."""


class Matrices:
    """The matrix parameters of a group that lie alike on one mesh: owners, buckets, and their way.

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
        self.parameters, self.directions = parameters, directions
        self.device = local_part(parameters[0]).device
        self.place = mesh_place(parameters[0], groups)
        placements = [tuple(p.placements) if isinstance(p, DTensor) else () for p in parameters]
        found = zip(shapes, extents_of_shards(shapes, placements, self.place))
        self.shapes, extents = zip(*(shape.as_stack(of_shards) for shape, of_shards in found))
        self._cut = [shape if shape.is_cut_whole else None for shape in self.shapes]
        self.dtype = agreed_dtype(matrix_dtype, self.place.groups, self.device)
        # Ranks outside of this mesh do not know this load: each set of ranks counts on its own.
        ranks = self.place.ranks
        plan = plan_buckets(
            self.shapes,
            extents,
            ORTHOGONALIZERS[directions.orthogonalize].flops,
            ranks,
            loads.setdefault(tuple(sorted(ranks)), {}),
        )
        described = [*zip(shapes, placements), plan, matrix_dtype, directions]
        check_same_plan(described, self.place.groups, self.device)
        self.buckets = [rank_bucket(planned, extents, self.place) for planned in plan]

    def way(self, bucket: Bucket, ends: Ends) -> Iterator[None]:
        """Go the way of a bucket. It stops twice, while something travels: others work then.

        Blocks are read and sent to the owners of their units, computed there and returned, and
        written. Matrices at home are sent to other replicas only; if there are none it never stops.
        """
        if not bucket.travels:
            for blocks, directions in self._at_home(bucket, ends):
                self._step_along(blocks, directions.flatten(), ends)
            return
        if bucket.home:
            yield
            at_home = [each.flatten() for _, each in self._at_home(bucket, ends)]
            returned = torch.cat([torch.empty(0, dtype=self.dtype, device=self.device), *at_home])
            yield
        else:
            away, here = bucket.outgoing.elements, bucket.incoming.elements
            arrived = yield from self._sent(self._read(bucket.outgoing.blocks, ends), away, here)
            self._compute(bucket, arrived)
            returned = yield from self._sent(arrived, here, away)
        self._write(bucket, returned, ends)

    def _sent(
        self, packed: Tensor, sent: Sequence[int], arriving: Sequence[int]
    ) -> Generator[None, None, Tensor]:
        """Send so many elements to each rank of the shard group. Return those that arrive."""
        group = self.place.shard_group
        if group is None:
            yield
            return packed
        values = packed.new_empty(sum(arriving))
        work = dist.all_to_all_single(values, packed, arriving, sent, group=group, async_op=True)
        yield
        work.wait()
        return values

    def _compute(self, bucket: Bucket, arrived: Tensor) -> None:
        """Make the directions of the units that this rank owns, in place of their blocks."""
        of_units: dict[Units, list[tuple[Block, Tensor]]] = {}
        sizes = [block.numel for block in bucket.incoming.blocks]
        for block, values in zip(bucket.incoming.blocks, arrived.split(sizes)):
            of_units.setdefault(block.units, []).append((block, values))
        for shape, alike in bucket.owned.items():
            lengths = [units.length for units in alike]
            whole = arrived.new_empty(sum(lengths), *shape)
            in_whole, in_blocks = [], []
            for units, slab in zip(alike, whole.split(lengths)):
                for block, values in of_units[units]:
                    some = slice(block.first, block.first + block.length)
                    in_whole.append(slab[some, block.rows, block.cols])
                    in_blocks.append(values.view(in_whole[-1].shape))
            torch._foreach_copy_(in_whole, in_blocks)
            for batch in whole.split(max(1, self._at_once() // math.prod(shape))):
                batch.copy_(self.directions(batch, self._cut[alike[0].parameter], self.dtype))
            torch._foreach_copy_(in_blocks, in_whole)  # each has been read

    def _write(self, bucket: Bucket, returned: Tensor, ends: Ends) -> None:
        """Pass the directions on to the other replicas, and step along this rank's of all."""
        of_replicas = [returned]
        if self.place.replica_group is not None:
            counts = [sum(block.numel for block in blocks) for blocks in bucket.by_replica]
            padded = returned.new_zeros(max(counts))
            padded[: len(returned)] = returned
            everyone = returned.new_empty(len(counts) * len(padded))
            all_gather_single(everyone, padded, group=self.place.replica_group)
            rows = everyone.view(len(counts), -1).unbind()
            of_replicas = [row[:count] for row, count in zip(rows, counts)]
        for values, blocks in zip(of_replicas, bucket.by_replica):
            self._step_along(blocks, values, ends)

    def _at_home(self, bucket: Bucket, ends: Ends) -> Iterator[tuple[list[Block], Tensor]]:
        """Yield this rank's matrices at home, in order, with their directions."""
        for blocks in batches(bucket.by_replica[self.place.replica], self._at_once()):
            units = blocks[0].units
            whole = self._read(blocks, ends).view(-1, *units.shape)
            directions = self.directions(whole, self._cut[units.parameter], self.dtype)
            yield blocks, directions.contiguous()

    def _at_once(self) -> int:
        """Return how many elements are orthogonalised at once."""
        on_cpu = self.device.type == "cpu"
        return BATCH_OF_CPU_THREAD * torch.get_num_threads() if on_cpu else BATCH_ELEMENTS

    def _read(self, blocks: Sequence[Block], ends: Ends) -> Tensor:
        """Return the values of blocks, one after the other: 0 where a matrix has no gradient."""
        elements = sum(block.numel for block in blocks)
        packed = torch.empty(elements, dtype=self.dtype, device=self.device)
        by_group, without_gradient = self._by_group(blocks, packed, ends)
        for group, some in by_group.items():
            ends.pack(group, some)
        for values in without_gradient:
            values.zero_()
        return packed

    def _step_along(self, blocks: Sequence[Block], packed: Tensor, ends: Ends) -> None:
        """Step along the directions of blocks, `packed`, where a matrix has a gradient."""
        by_group, _ = self._by_group(blocks, packed, ends)
        for group, some in by_group.items():
            ends.step_along(group, some)

    def _by_group(
        self, blocks: Sequence[Block], packed: Tensor, ends: Ends
    ) -> tuple[dict[int, list[BlockOf]], list[Tensor]]:
        """Return the blocks of matrices that have a gradient, and the values of the others.

        Their values lie one after the other in `packed`.
        """
        by_group: dict[int, list[BlockOf]] = {}
        without_gradient = []
        stops = itertools.accumulate(block.numel for block in blocks)
        slices = ((packed, stop - block.numel, block.numel) for block, stop in zip(blocks, stops))
        for block, values in zip(blocks, flat_slices(slices)):
            place = ends.places.get(self.parameters[block.units.parameter])
            if place is None:
                without_gradient.append(values)
            else:
                group, number = place
                of_tensor = BlockOf(number, block.start, block.units.shape, values)
                by_group.setdefault(group, []).append(of_tensor)
        return by_group, without_gradient


def travel(matrices: Iterable[Matrices], ends: Ends) -> Iterator[None]:
    """Go the way of all matrices of a step, bucket by bucket: transfers overlap with work.

    It stops once, while the first bucket travels, so that other work is done. While bucket k is
    computed, bucket k + 1 travels in and k - 1 out.
    """
    every = [(bucket, each.way(bucket, ends)) for each in matrices for bucket in each.buckets]
    ways = [way for bucket, way in every if bucket.travels]

    def go_on(number: int) -> None:
        if 0 <= number < len(ways):
            next(ways[number], None)

    go_on(0)
    for bucket, way in every:
        if not bucket.travels:
            next(way, None)
    yield
    for number in range(len(ways) + 1):
        go_on(number + 1)  # sends
        go_on(number)  # computes, and returns
        go_on(number - 1)  # writes


def batches(blocks: Sequence[Block], elements: int) -> Iterator[list[Block]]:
    """Yield whole blocks of equal shape together, at most so many `elements`, or one matrix."""
    for matrix, alike in itertools.groupby(blocks, lambda block: block.units.shape):
        size = max(1, elements // math.prod(matrix))
        batch: list[Block] = []
        free = size
        for block in itertools.chain.from_iterable(each.cut(size) for each in alike):
            if block.length > free:
                yield batch
                batch, free = [], size
            batch.append(block)
            free -= block.length
        yield batch
