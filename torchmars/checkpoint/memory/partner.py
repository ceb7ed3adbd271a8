"""Another machine, whose rank keeps a second copy of this rank's part."""

import torch
import torch.distributed as dist
from torch import Tensor

from torchmars.checkpoint.memory import OPTION
from torchmars.checkpoint.memory.slots import Slot, header_of
from torchmars.parallel.layout import Layout

PIECE = 2**26  # bytes that are sent at a time


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
