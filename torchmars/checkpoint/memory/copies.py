"""Copies of a run in the memory of its launchers: ranks that start again resume from them.

Each rank keeps the last two copies of its part. Where there are several machines, it also keeps
those of a rank of the machine before, so that the run survives the loss of a machine. Another
number of ranks can read them too. They stay until the first copy of the new ranks is complete.
"""

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from secrets import token_hex
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from torchmars.checkpoint.manifest import CheckpointManifest
from torchmars.checkpoint.memory.exchange import PIECE, Resharding, partner_of
from torchmars.checkpoint.memory.shared_memory import LOCK, PLACE, memory_of_launcher
from torchmars.checkpoint.memory.slots import (
    GENERATIONS,
    HEADERS,
    Header,
    Key,
    Slot,
    headers_in,
    kinds_of,
    prefix_of,
    read_header,
    size_of,
    slots_of,
    views,
)
from torchmars.checkpoint.staging import Staging
from torchmars.cluster import process
from torchmars.core.device import is_gpu, pin
from torchmars.core.errors import UserError
from torchmars.core.files import lock
from torchmars.optim.tensors import local_part
from torchmars.parallel.layout import Layout

T = TypeVar("T")
Copy = tuple[CheckpointManifest, dict[str, Tensor]]


class MemoryCopies:
    """The copies that this rank makes of its part of a run, and keeps of another rank's.

    Every rank makes the same calls. Each raises `UserError` on every rank where a copy cannot be
    written or read: the run then continues without copies.
    """

    def __init__(self, layout: Layout, state: dict[str, Tensor]) -> None:
        """Take the memory for copies of tensors such as `state`, by name.

        Raises `UserError` on every rank where there is too little.
        """
        self.layout, self.rank = layout, layout.world.rank
        self.kinds, self.staging = kinds_of(state), Staging(layout.device)
        self.on_gpu = is_gpu(layout.device.type)
        self.start = layout.on_first(lambda: token_hex(8))
        machines = layout.machines(process.local_rank())
        here = next(number for number, ranks in enumerate(machines) if self.rank in ranks)
        self.machine = machines[here]
        self.partner = partner_of(layout, machines)
        kept = [*self.machine, *(machines[here - 1] if self.partner else [])]
        self.prefixes = tuple(prefix_of(rank, layout.world.size) for rank in kept)
        """What the names of files in use on this machine begin with."""
        self.in_background = self.on_gpu or self.partner is not None
        """Whether a copy is still made, or on its way, when `keep` returns."""
        self.thread: threading.Thread | None = None
        self.error: Exception | None = None
        self.size = size_of(self.kinds)
        self.other = self.partner.swap_number(self.size) if self.partner else 0
        self.folder: Path
        self.own: list[Slot] = []
        self.others: list[Slot] = []
        self.reserved = self.made = False
        """Whether all ranks have their slots, and whether they have made a copy since the start."""
        layout.on_all(self._told(self._open))
        try:
            self._reserve_on_all()
        except UserError:  # copies of other ranks may take the room: they are read first
            if layout.agree(self._told(lambda: not self._leftovers())):
                raise

    def _open(self) -> None:
        """Find the folder of the copies. Raises `UserError` if there is none."""
        folder = memory_of_launcher()
        if folder is None:
            raise UserError("only torchmars train and launch have memory for them")
        self.folder = folder
        # A launcher deletes what others have left, but not what ranks that outlive theirs hold.
        lock(folder / f"{LOCK}-{self.rank:05d}", "using it")

    def _reserve_on_all(self) -> None:
        """Take the memory for copies on every rank. Raises `UserError` if there is too little."""
        self.layout.on_all(self._told(self._reserve))
        self.reserved = True

    def _reserve(self) -> None:
        """Take the memory for copies of this rank and of its partner, unless it has it."""
        if self.own:
            return
        ranks = self.layout.world.size
        try:
            for number in range(GENERATIONS):
                self.own.append(Slot(self.folder, self.rank, ranks, number, self.size))
                if self.partner:
                    source = self.partner.source
                    self.others.append(Slot(self.folder, source, ranks, number, self.other))
        except OSError as error:
            for slot in (*self.own, *self.others):
                if slot.header() is None:  # others may be the last copy of a lost machine
                    slot.data.unlink(missing_ok=True)
            self.own, self.others = [], []
            needed = GENERATIONS * (self.size + self.other) / 2**20
            raise UserError(
                f"rank {self.rank} needs {needed:,.0f} MiB of {PLACE} on {process.node()} "
                f"({error.strerror})"
            ) from None
        if self.on_gpu:  # pinned, so that the device copies to it while the host goes on
            for slot in self.own:
                pin(slot.memory, self.size, self.layout.device.type)

    def _leftovers(self) -> list[Path]:
        """Return the files of copies on this machine that none of its ranks makes or keeps."""
        files = self.folder.glob("rank-*")
        return [file for file in files if not file.name.startswith(self.prefixes)]

    def _delete_leftovers(self) -> None:
        for file in self._leftovers():
            file.unlink(missing_ok=True)

    def _told(self, work: Callable[[], T]) -> Callable[[], T]:
        """Return `work` with a `UserError` instead of errors of the system and of the network."""

        def told() -> T:
            try:
                return work()
            except (OSError, RuntimeError) as error:
                reason = (getattr(error, "strerror", None) or str(error)).partition("\n")[0]
                raise UserError(f"rank {self.rank} on {process.node()}: {reason}") from None

        return told

    def keep(self, manifest: CheckpointManifest, state: dict[str, Tensor]) -> None:
        """Copy `state`, the tensors of this rank, of the step of `manifest`.

        Whoever changes the tensors of `state` then calls `before_change` first.
        """
        # The copy before must be complete on all ranks before any rank gives up an older one.
        self.finish()
        if self.made:
            self._try(self._delete_leftovers)
        elif not self.reserved:
            self.layout.on_all(self._told(self._delete_leftovers))
            self._reserve_on_all()
        self.made = True
        slot = oldest(self.own)
        copied = self.staging.fill(views(slot.memory, self.kinds), local_parts(state))

        def complete() -> None:
            copied()
            slot.complete(
                Header(
                    process.meeting()[1],
                    manifest.step,
                    self.start,
                    self.rank,
                    self.layout.world.size,
                    manifest.text(),
                    self.kinds,
                    slot.crc32(),
                )
            )

        def complete_everywhere() -> None:
            if self.on_gpu:
                torch.get_device_module(self.layout.device).set_device(self.layout.device)
                self._try(complete)
            if (partner := self.partner) is not None:  # which waits, whatever went wrong here
                self._try(lambda: partner.swap(slot, oldest(self.others)))

        self._try(slot.drop)
        if not self.on_gpu:  # a rank that dies from here on costs the step that it is in
            self._try(complete)
        if self.in_background:
            self.thread = threading.Thread(target=complete_everywhere, name="memory", daemon=True)
            self.thread.start()

    def _try(self, work: Callable[[], object]) -> None:
        """Run `work`. Its errors are raised at the next call, on all ranks."""
        try:
            work()
        except Exception as error:
            self.error = error

    def finish(self) -> None:
        """Wait until the copy under way is complete on all ranks."""
        self.layout.on_all(self._told(self._wait))

    def _wait(self) -> None:
        """Wait until the copy under way is complete. Raises its errors."""
        if self.thread is not None:
            self.thread.join()
            self.thread = None
        if self.error is not None:
            raise self.error

    def before_change(self) -> None:
        """Let the change of weights and state that comes wait for the copies of them."""
        self.staging.before_change()

    def newest(self, least: int) -> Copy | None:
        """Return the newest copy of which all parts are there, unless it is of less than `least`.

        It is its manifest and, by name, this rank's part of each tensor. If other ranks made it,
        the state of their generators is not in it. Copies that are damaged are told and dropped,
        and so are all others.
        """
        offers = self.layout.gather(
            self._told(lambda: [(each.key, each.rank) for _, each in headers_in(self.folder)])
        )
        choice = self.layout.on_first(lambda: choose_copy(offers, least))
        if choice is None:
            self.drop()
            return None
        key, holders = choice
        same = key.ranks == self.layout.world.size and self.reserved
        copy = self._own_part(key, holders) if same else self._resharded(key, holders)
        if copy is None:
            self.layout.say(f"warning: the copy of step {key.step} in memory is damaged")
            return self.newest(least)
        self.layout.on_all(self._told(lambda: self._drop_all_but(key)))
        return copy

    def _own_part(self, key: Key, holders: Sequence[int]) -> Copy | None:
        """Return the copy `key`, which as many ranks made. None if a part of it is damaged."""
        if not self.layout.agree(self._told(lambda: self._fetch(key, holders))):
            return None
        slot, header = slots_of(self.folder, key)[self.rank]
        return header.read_manifest(), views(slot.memory, self.kinds)

    def _resharded(self, key: Key, holders: Sequence[int]) -> Copy | None:
        """Return the copy `key` of any ranks, in memory of its own. None if it is of no use.

        What is damaged is dropped by the rank that holds it. All copies are dropped where they are
        of other tensors.
        """
        held: dict[int, tuple[Slot, Header]] = {}

        def hold() -> bool:
            found = slots_of(self.folder, key)
            held.update({part: found[part] for part in found if holders[part] == self.rank})
            bad = [slot for slot, header in held.values() if header.crc32 != slot.crc32()]
            for slot in bad:
                slot.drop()
            return not bad

        if not self.layout.agree(self._told(hold)):
            return None
        same = key.ranks == self.layout.world.size
        wanted = [kind for kind in self.kinds if same or not kind.name.startswith("rng.")]
        work = Resharding(self.layout, self.machine, holders, held, wanted)
        self.layout.on_all(self._told(work.learn))
        if not self.layout.agree(self._told(work.reserve)):
            self.drop()
            return None
        self.layout.on_all(self._told(work.exchange))
        header = self.layout.broadcast(held[0][1] if 0 in held else None, holders[0])
        assert header is not None  # its holder has it
        return header.read_manifest(), work.parts

    def drop(self) -> None:
        """Drop all copies."""
        self.finish()
        self.layout.on_all(self._told(lambda: self._drop_all_but(None)))

    def _fetch(self, key: Key, holders: Sequence[int]) -> bool:
        """Let each rank have its part of the copy `key`, from the ranks that hold them.

        Return whether this rank's is good. A bad copy is dropped, on the rank that has it.
        """
        for rank, holder in enumerate(holders):
            if holder != rank and self.rank == holder:
                self._give(key, rank)
            elif holder != rank and self.rank == rank:
                self._take(holder)
        found = slots_of(self.folder, key).get(self.rank)
        if found is None:
            return False
        slot, header = found
        good = header.tensors == self.kinds and header.crc32 == slot.crc32()
        if not good:
            slot.drop()
        return good

    def _give(self, key: Key, rank: int) -> None:
        """Send the part of another rank that lies on this machine, if it is good."""
        good = False
        try:
            found = slots_of(self.folder, key).get(rank)
            good = found is not None and found[1].crc32 == found[0].crc32()
        finally:  # the rank waits
            if not good:
                self.layout.send(None, rank)
        if found is None:
            return
        slot, header = found
        if not good:
            slot.drop()
            return
        self.layout.send(header, rank)
        for piece in slot.memory.split(PIECE):
            dist.send(piece, rank, group=self.layout.control)

    def _take(self, holder: int) -> None:
        """Receive this rank's part from the one that keeps it."""
        header: Header | None = self.layout.receive(holder)
        if header is None:
            return
        slot = oldest(self.own)
        try:
            slot.drop()
        finally:  # the holder sends
            for piece in slot.memory.split(PIECE):
                dist.recv(piece, holder, group=self.layout.control)
        slot.complete(header)

    def _drop_all_but(self, key: Key | None) -> None:
        for file in self.folder.glob(HEADERS):
            header = read_header(file)
            if header is None or header.key != key:
                file.unlink(missing_ok=True)


def choose_copy(offers: list[list[tuple[Key, int]]], least: int) -> tuple[Key, list[int]] | None:
    """Return the newest copy of which all parts are offered, and the rank that holds each part.

    `offers` has for each rank the copies on its machine, each with the rank whose part it is. None
    where there is no whole copy of step `least` or a later one.
    """
    found: dict[Key, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for holder, offered in enumerate(offers):
        for key, rank in offered:
            found[key][rank].append(holder)
    whole = [key for key, by in found.items() if len(by) == key.ranks and key.step >= least]
    if not whole:
        return None
    key = max(whole)
    parts = sorted(found[key].items())
    # The ranks of a machine share the work.
    return key, [part if part in by else by[part % len(by)] for part, by in parts]


def oldest(slots: Sequence[Slot]) -> Slot:
    """Return the slot whose copy may be given up: an empty one, or the lower step's."""
    headers = [(slot, slot.header()) for slot in slots]
    return min(headers, key=lambda each: -1 if each[1] is None else each[1].step)[0]


def local_parts(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return this rank's part of each tensor, by name."""
    return {name: local_part(tensor) for name, tensor in state.items()}
