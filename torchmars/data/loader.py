"""Batches of the windows of a split, for training in the global order and for validation."""

from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from torchmars.cluster.signals import be_helper
from torchmars.data.mixture import MixedWindows
from torchmars.data.order import Samples, rank_samples
from torchmars.data.shares import Shares, shares_from_start
from torchmars.data.windows import ChangedData


@dataclass(frozen=True, eq=False)
class Sent:
    """Windows [m, T + 1] on their way from a worker, through a pipe.

    A tensor alone would come as an open file, by a handshake with a thread of the worker: that
    takes the host longer than the values do.
    """

    windows: Tensor

    @classmethod
    def together(cls, windows: Sequence[Tensor]) -> "Sent":
        """Return windows [T + 1] as one batch."""
        return cls(torch.stack(list(windows)))

    @classmethod
    def received(cls, windows: np.ndarray) -> "Sent":
        """Return the bytes that came through the pipe."""
        return cls(torch.from_numpy(windows))

    def __reduce__(self) -> tuple[Any, ...]:
        return Sent.received, (self.windows.numpy(),)

    def pin_memory(self) -> "Sent":
        """Return the same in memory that a GPU copies from by itself. The loader calls it."""
        return Sent(self.windows.pin_memory())


@dataclass(eq=False)
class Loader:
    """Batches of the training split in the global order.

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
    num_workers: int
    pin_memory: bool = False
    position: int = 0
    shares: Shares = Shares()
    changed: ChangedData | None = None
    """The shard that changed while the run read it. The batches are zeros then."""
    _batches: Iterator[Sent] | None = None
    _peeked: list[Tensor] | None = None

    @property
    def epochs(self) -> list[int]:
        """How many times all windows of each part have been read."""
        read = self.shares.counts(self.position)
        return [count // windows for count, windows in zip(read, self.windows.lengths)]

    def seek(self, position: int, shares: Shares) -> None:
        """Go on from global sample number `position`, as a run on any layout left it."""
        self.position, self.shares = position, shares
        self.close()

    def close(self) -> None:
        """End the processes that read ahead. They ignore the signals in `signals.STOPPING`."""
        self._batches = self._peeked = None

    def step(self) -> list[Tensor]:
        """Return this rank's microbatches of the next global batch, and move `position` past it.

        Where the data have changed they are zeros: other ranks may not know it yet, and need this
        one in the step. Check `changed` before the results are used.
        """
        batch = self.peek()
        self._peeked = None
        self.position += self.global_batch_size
        return batch

    def check(self) -> None:
        """Raise `ChangedData` if a shard has changed while the run read it."""
        if self.changed is not None:
            raise self.changed

    def peek(self) -> list[Tensor]:
        """Return the microbatches that the next `step` will return."""
        if self._peeked is None:
            count = self.global_batch_size // self.ranks // self.microbatch_size
            try:
                self.check()
                self._peeked = [next(self._stream()).windows for _ in range(count)]
            except ChangedData as error:
                # A worker's exception carries its traceback in front of the message.
                self.changed = ChangedData(str(error).rpartition("ChangedData: ")[2].strip())
                # The frames and the workers refer to each other. Workers whose end is left to the
                # garbage collector do not end.
                error.with_traceback(None)
                self.close()
                shape = self.microbatch_size, self.windows.seq_len + 1
                self._peeked = [torch.zeros(shape, dtype=torch.int64)] * count
        return self._peeked

    def _stream(self) -> Iterator[Sent]:
        if self._batches is None:
            samples = rank_samples(
                self.position, self.global_batch_size, self.microbatch_size, self.rank, self.ranks
            )
            # A generator of its own: a start of the loader must not draw from dropout's.
            self._batches = iter(
                DataLoader(
                    Samples(self.windows, self.shares, self.seed),
                    batch_sampler=samples,
                    num_workers=self.num_workers,
                    collate_fn=Sent.together,
                    pin_memory=self.pin_memory,
                    generator=torch.Generator(),
                    worker_init_fn=be_helper,
                )
            )
        return self._batches


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
        yield torch.stack([windows[place] for place in padded]), [part for part, _ in mine]
