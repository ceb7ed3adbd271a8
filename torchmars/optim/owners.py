"""Which rank owns which matrix.

A matrix that is sharded over several ranks is orthogonalised whole, on one of them. The plan
follows from shapes, meshes and placements alone, so every rank makes the same one on its own.
`exchange.py` carries it out.
"""

import heapq
import math
from collections.abc import Callable, Sequence

from torchmars.optim.matrices import MatrixShape, Unit, units_of

# A bucket travels in one all-to-all. It is small enough to overlap with the work on others, and has
# work for every rank.
BUCKET_ELEMENTS = 2**26


def plan_buckets(
    shapes: Sequence[MatrixShape],
    flops: Callable[[int, int], int],
    ranks: Sequence[int],
    loads: dict[int, int],
) -> list[list[tuple[Unit, int]]]:
    """Return units with their owners, bucket by bucket. Owners are indices into `ranks`.

    Parameters go into buckets by falling cost, so that equal shapes lie in one. The units of a
    bucket go to ranks, the most costly first, each to the rank with the least work so far ("longest
    processing time", Graham 1969). `flops` is the cost of a matrix [rows, cols]. `loads` is the
    work of each global rank in FLOPs. It is carried on from bucket to bucket, and updated.
    """

    def cost(unit: Unit) -> int:
        return flops(unit.rows, unit.cols)

    units = [units_of(number, shape) for number, shape in enumerate(shapes)]
    order = sorted(
        range(len(shapes)),
        key=lambda number: (
            -sum(map(cost, units[number])),
            shapes[number].shape,
            number,
        ),
    )
    elements = max(1, sum(math.prod(shape.shape) for shape in shapes))
    count = max(1, min(-(-elements // BUCKET_ELEMENTS), sum(map(len, units)) // len(ranks)))

    buckets: list[list[tuple[Unit, int]]] = [[] for _ in range(count)]
    filled = 0
    for number in order:
        buckets[min(filled * count // elements, count - 1)] += [
            (unit, -1) for unit in units[number]
        ]
        filled += math.prod(shapes[number].shape)
    buckets = [bucket for bucket in buckets if bucket]
    heap = [(loads.get(rank, 0), owner) for owner, rank in enumerate(ranks)]
    heapq.heapify(heap)
    for bucket in buckets:
        for place in sorted(range(len(bucket)), key=lambda place: -cost(bucket[place][0])):
            unit = bucket[place][0]
            load, owner = heapq.heappop(heap)
            bucket[place] = unit, owner
            heapq.heappush(heap, (load + cost(unit), owner))
    loads |= {ranks[owner]: load for load, owner in heap}
    return buckets
