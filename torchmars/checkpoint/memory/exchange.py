"""What ranks send each other of copies: to keep them on another machine, or to read them.

Another machine's rank keeps a second copy of this rank's part. Other ranks than made a copy take
their boxes from those that have them.
"""

import math
import pickle
from collections import defaultdict
from collections.abc import Sequence
from itertools import zip_longest
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from torchmars.checkpoint.memory import OPTION
from torchmars.checkpoint.memory.slots import Header, Slot, TensorKind, header_of, views
from torchmars.optim.matrices.shapes import Interval
from torchmars.parallel.layout import Layout

PIECE = 2**26  # bytes that are sent at a time
Box = tuple[Interval, ...]


class Partner:
    """The rank of another machine that keeps this one's copies, and the one whose it keeps.

    What they exchange passes through a group of its own, beside the collectives of the training.
    """

    def __init__(self, keeper: int, source: int, group: dist.ProcessGroup) -> None:
        """Copies go to the rank `keeper`, and come from the rank `source`."""
        self.keeper, self.source, self.group = keeper, source, group

    def swap_number(self, number: int) -> int:
        """Send a number to the keeper, and return that of the source."""
        given, taken = torch.tensor([number]), torch.zeros(1, dtype=torch.int64)
        self._swap(given, taken)
        return int(taken)

    def swap(self, own: Slot, other: Slot) -> None:
        """Send a copy to the keeper, and fill the slot `other` with that of the source.

        There may be none, where it could not be made: an empty header says so.
        """
        found = own.header()
        text = found.text().encode() if found else b""
        header = torch.zeros(self.swap_number(len(text)), dtype=torch.uint8)
        self._swap(torch.tensor(bytearray(text), dtype=torch.uint8), header)
        try:
            other.drop()
        finally:  # the partners wait
            self._swap(
                own.memory if len(text) else own.memory[:0],
                other.memory if len(header) else other.memory[:0],
            )
        if len(header):
            taken = header_of(header.numpy().tobytes())
            if taken.crc32 == other.crc32():
                other.complete(taken)

    def _swap(self, given: Tensor, taken: Tensor) -> None:
        swap(given, self.keeper, taken, self.source, self.group)


def swap(given: Tensor, to: int, taken: Tensor, source: int, group: dist.ProcessGroup) -> None:
    """Send bytes to a rank, and fill others with those of a source, in pieces of `PIECE`.

    Nothing is sent of no bytes.
    """
    pieces = [piece for piece in given.split(PIECE) if len(piece)]
    works = [dist.isend(piece, to, group=group) for piece in pieces]
    pieces = [piece for piece in taken.split(PIECE) if len(piece)]
    works += [dist.irecv(piece, source, group=group) for piece in pieces]
    for work in works:
        if work is not None:
            work.wait()


def partner_of(layout: Layout, machines: list[list[int]]) -> Partner | None:
    """Return the partner of this rank; None on a machine alone. Called by every rank.

    `machines` are the ranks of each. Where these are not as many on all there is none, and a line
    says so.
    """
    rank = layout.world.rank
    if len(machines) == 1:
        return None
    if len({len(ranks) for ranks in machines}) > 1:
        layout.say(
            f"warning: {OPTION}: no machine keeps copies of another, since they have different "
            "numbers of ranks"
        )
        return None
    here = next(number for number, ranks in enumerate(machines) if rank in ranks)
    place = machines[here].index(rank)
    keeper, source = (machines[(here + way) % len(machines)][place] for way in (1, -1))
    partner = Partner(keeper, source, layout.with_own_control_group().control)
    partner.swap_number(0)  # connects them, while all live
    return partner


class Wish(NamedTuple):
    """What a rank asks of another: a box of a tensor, of a part that the other holds."""

    part: int
    name: str
    box: Box


class Resharding:
    """The boxes that this rank takes of a copy, and those that it gives. Every rank has one.

    `holders` are the ranks that give each part, `held` the parts of this rank, `machine` the ranks
    of its machine, and `wanted` the tensors that it is to have.
    """

    def __init__(
        self,
        layout: Layout,
        machine: Sequence[int],
        holders: Sequence[int],
        held: dict[int, tuple[Slot, Header]],
        wanted: list[TensorKind],
    ) -> None:
        self.layout, self.machine, self.holders = layout, machine, holders
        self.held = {
            part: (
                {kind.name: kind for kind in header.tensors},
                views(slot.memory, header.tensors),
            )
            for part, (slot, header) in held.items()
        }
        self.wanted = {kind.name: kind for kind in wanted}
        self.wishes: dict[int, list[Wish]] = defaultdict(list)
        """By the rank that gives them."""
        self.parts: dict[str, Tensor] = {}

    def learn(self) -> None:
        """Find out who has what this rank wants. Called by every rank.

        One part after the other is told to all, so that no rank ever has the tensors of all ranks.
        Of replicas the nearest is taken.
        """
        rank, size = self.layout.world.rank, self.layout.world.size
        sources: dict[tuple[str, Box], tuple[bool, int, int]] = {}
        for part, holder in enumerate(self.holders):
            near = holder not in self.machine, (rank - holder) % size, part
            kinds, _ = self.held.get(part, ({}, {}))
            for kind in self.layout.broadcast([*kinds.values()], holder):
                wanted = self.wanted.get(kind.name)
                if wanted is None or wanted.dtype != kind.dtype:
                    continue
                common = overlap(wanted.box, kind.box)
                if volume(common):
                    key = kind.name, common
                    sources[key] = min(sources.get(key, near), near)
        for (name, box), (*_, part) in sources.items():
            self.wishes[self.holders[part]].append(Wish(part, name, box))

    def reserve(self) -> bool:
        """Take the memory for the tensors; return whether the parts have all of each."""
        found: dict[str, int] = defaultdict(int)
        for wish in (wish for wishes in self.wishes.values() for wish in wishes):
            found[wish.name] += volume(wish.box)
        for name, kind in self.wanted.items():
            self.parts[name] = torch.empty(kind.shape, dtype=getattr(torch, kind.dtype))
        return all(found[name] == part.numel() for name, part in self.parts.items())

    def exchange(self) -> None:
        """Fill the tensors. Called by every rank.

        In each round a rank gives to one other and takes from one other, so that all are busy and
        none waits for one that waits for it.
        """
        layout, rank, size = self.layout, self.layout.world.rank, self.layout.world.size
        wishes = [self.wishes[each] for each in range(size)]
        texts = [pickle.dumps(each) if each else b"" for each in wishes]
        lengths = torch.tensor([len(text) for text in texts])
        asked = [torch.empty_like(lengths) for _ in range(size)]
        dist.all_gather(asked, lengths, group=layout.control)
        for wish in wishes[rank]:
            self._place(wish).copy_(self._piece(wish))
        for shift in range(1, size):
            giver, taker = (rank - shift) % size, (rank + shift) % size
            text = torch.empty(int(asked[taker][rank]), dtype=torch.uint8)
            own = torch.tensor(bytearray(texts[giver]), dtype=torch.uint8)
            swap(own, giver, text, taker, layout.control)
            others = pickle.loads(text.numpy().tobytes()) if len(text) else []
            for wish, other in zip_longest(wishes[giver], others):
                given = flat_bytes(self._piece(other)) if other else text[:0]
                place = self._place(wish) if wish else text[:0]
                taken = torch.empty_like(place, memory_format=torch.contiguous_format)
                swap(given, taker, flat_bytes(taken), giver, layout.control)
                place.copy_(taken)

    def _piece(self, wish: Wish) -> Tensor:
        """Return what a rank asks for of a part that this one holds."""
        kinds, parts = self.held[wish.part]
        return inside(parts[wish.name], kinds[wish.name].box, wish.box)

    def _place(self, wish: Wish) -> Tensor:
        """Return where the answer to a wish of this rank belongs."""
        return inside(self.parts[wish.name], self.wanted[wish.name].box, wish.box)


def overlap(one: Box, other: Box) -> Box:
    """Return the box that two boxes of a tensor share. Where there is none its volume is 0."""
    return tuple((begin := max(a, c), max(begin, min(b, d))) for (a, b), (c, d) in zip(one, other))


def volume(box: Box) -> int:
    """Return how many elements a box has."""
    return math.prod(end - begin for begin, end in box)


def inside(part: Tensor, box: Box, inner: Box) -> Tensor:
    """Return the elements of a box inside of the `box` whose elements are `part`."""
    return part[tuple(slice(b - first, e - first) for (b, e), (first, _) in zip(inner, box))]


def flat_bytes(piece: Tensor) -> Tensor:
    """Return the bytes of a tensor, without a copy where it is contiguous."""
    return piece.contiguous().view(-1).view(torch.uint8)
