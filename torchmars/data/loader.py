"""Batches of the windows of a split, for training in the global order and for validation."""

import atexit
import os
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torchdata.nodes import BaseNode, Prefetcher

from torchmars.cluster import process
from torchmars.core.device import is_gpu
from torchmars.core.errors import LoneMistake, UserError
from torchmars.data.order import Place, Shares, places_of, rank_places, shares_from_start
from torchmars.data.windows import MixedWindows


class Microbatches(BaseNode[Tensor | BaseException]):
    """Reads microbatches, token ids [m, T + 1], int64; pinned if `device` is a GPU.

    The thread of a `Prefetcher` calls it. torchdata's other threads would change how many threads
    torch uses in those that begin later. What is raised takes the place of a microbatch: it would
    end the thread, and whoever waits for it might do so for ever.
    """

    def __init__(
        self, windows: MixedWindows, places: Iterator[list[Place]], device: torch.device
    ) -> None:
        super().__init__()
        self.windows, self.places, self.device = windows, places, device

    def next(self) -> Tensor | BaseException:
        """Return the next microbatch, or why it cannot be read."""
        pinned = is_gpu(self.device.type)
        try:
            if pinned:  # a thread begins with the first GPU, and would pin for that
                torch.get_device_module(self.device).set_device(self.device)
            return self.windows.batch(next(self.places), pinned)
        except BaseException as error:
            return error

    def get_state(self) -> dict[str, Any]:
        """Return nothing: what counts is what was consumed, and the loader knows it."""
        return {}


@dataclass(eq=False)
class Loader:
    """Batches of the training split in the global order, read ahead on a thread.

    Its whole state is `position`, the number of samples consumed so far, and `shares`, which deals
    them to the parts of the mixture. Each optimizer step takes one `step()`: this rank's
    microbatches, token ids [m, T + 1], int64.
    """

    windows: MixedWindows
    _: KW_ONLY
    seed: int
    global_batch_size: int
    microbatch_size: int
    rank: int
    ranks: int
    device: torch.device = torch.device("cpu")
    position: int = 0
    shares: Shares = Shares()
    _ahead: Prefetcher[Tensor | BaseException] | None = None
    _peeked: list[Tensor] | None = None

    @property
    def epochs(self) -> list[int]:
        """How many times all windows of each part have been read."""
        read = self.shares.counts(self.position)
        return [count // windows for count, windows in zip(read, self.windows.lengths)]

    def state_dict(self) -> dict[str, Any]:
        """Return what was consumed up to the last step: it fits any layout."""
        return {"position": self.position, "shares": self.shares}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what a loader has consumed on any layout."""
        self.position, self.shares = state["position"], state["shares"]
        self.close()

    def close(self) -> None:
        """End the thread. The next `peek` or `step` starts another one."""
        self._ahead = self._peeked = None  # a `Prefetcher` joins its thread when it is deleted

    def step(self) -> list[Tensor]:
        """Return this rank's microbatches of the next global batch, and move `position` past it.

        Raises `UserError` of data that cannot be read; one of several ranks raises `LoneMistake`.
        """
        batch = self.peek()
        self._peeked = None
        self.position += self.global_batch_size
        return batch

    def peek(self) -> list[Tensor]:
        """Return the microbatches that the next `step` will return. Raises as it does."""
        if self._peeked is None:
            count = self.global_batch_size // self.ranks // self.microbatch_size
            if self._ahead is None:
                find = partial(places_of, self.shares, self.windows.lengths, self.seed)
                step, size = self.global_batch_size, self.microbatch_size
                mine = range(self.rank * count * size, (self.rank + 1) * count * size)
                places = rank_places(find, self.position, step, mine, size)
                node = Microbatches(self.windows, places, self.device)
                self._ahead = Prefetcher(node, 2 * count, snapshot_frequency=0)  # two steps
                with_threads.add(self)
            batch = []
            try:
                for _ in range(count):
                    read = next(self._ahead)
                    if isinstance(read, BaseException):
                        raise read
                    batch.append(read)
            except BaseException as failure:  # also Ctrl-C: what it has taken comes again
                self.close()
                if isinstance(failure, UserError) and process.world_size() > 1:
                    raise LoneMistake(str(failure)) from None
                raise
            self._peeked = batch
        return self._peeked


with_threads: WeakSet[Loader] = WeakSet()


@atexit.register
def close_all() -> None:
    """End the threads of all loaders: none may run while Python ends, or in a process's fork."""
    for loader in [*with_threads]:
        loader.close()


os.register_at_fork(before=close_all)


def validation_batches(
    windows: MixedWindows,
    weights: Sequence[float],
    count: int,
    batch_size: int,
    rank: int,
    ranks: int,
) -> Iterator[tuple[Tensor, list[int]]]:
    """Yield this rank's share of `count` windows, each part's spread evenly over its split.

    Each item is (token ids [batch_size, T + 1], the parts of those rows that count). Every rank
    gets the same number of batches, since a sharded forward pass needs all ranks: what is missing
    is filled with repetitions that do not count. A part with fewer windows than its share of
    `count` by the `weights` gives all it has.
    """
    chosen = []
    for part, wanted in enumerate(shares_from_start(weights).counts(count)):
        available = windows.lengths[part]
        taken = min(wanted, available)
        chosen += [(part, index * available // taken) for index in range(taken)]
    stride = batch_size * ranks
    for begin in range(0, len(chosen), stride):
        mine = chosen[begin + rank * batch_size : begin + (rank + 1) * batch_size]
        padded = (mine + [chosen[0]] * batch_size)[:batch_size]
        yield windows.batch(padded), [part for part, _ in mine]
