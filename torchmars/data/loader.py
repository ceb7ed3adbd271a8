"""The global order of the data: sample i of a run is one fixed window, whatever the layout."""

import hashlib
import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler
from torchdata.stateful_dataloader import StatefulDataLoader

from torchmars.cluster.signals import ignore_stop_signals
from torchmars.core.errors import UserError
from torchmars.data.shards import Split, TokenDtype, check_shard, count_windows, numpy_dtype


class ChangedData(UserError):
    """A shard is not any more what it was when the run began. The message names it."""


class Windows(Dataset):
    """The windows of a split: samples of T + 1 tokens (T = `seq_len`).

    Window w is tokens [w T, w T + T + 1) of the shards, end to end. The one token of overlap makes
    every token but the first a target once. Make this before the shards are verified: each read
    checks whether its shard has been written to since, and verifies it anew if so. Shards are not
    memory-mapped: one that is cut short would end the process by a bus error.
    """

    def __init__(self, folder: Path, split: Split, dtype: TokenDtype, seq_len: int) -> None:
        self.folder, self.shards, self.dtype = folder, split.shards, dtype
        self.stamps = [_stamp(str(folder / shard.file)) for shard in split.shards]
        self.starts = np.cumsum([0] + [shard.tokens for shard in split.shards])
        self.seq_len = seq_len

    def __len__(self) -> int:
        return count_windows(int(self.starts[-1]), self.seq_len)

    def __getitem__(self, window: int) -> Tensor:
        """Return token ids [T + 1], int64. Raises `ChangedData`."""
        begin, end = window * self.seq_len, (window + 1) * self.seq_len + 1
        parts = []
        for shard in range(np.searchsorted(self.starts, begin, side="right") - 1, len(self.shards)):
            first, last = self.starts[shard : shard + 2]
            if first >= end:
                break
            part = max(begin, first) - first, min(end, last) - first
            parts.append(self._read(shard, *map(int, part)))
        return torch.from_numpy(np.concatenate(parts).astype(np.int64))

    def _read(self, shard: int, begin: int, end: int) -> np.ndarray:
        """Return tokens [begin, end) of a shard."""
        file, dtype = str(self.folder / self.shards[shard].file), numpy_dtype(self.dtype)
        first, last = begin * dtype.itemsize, end * dtype.itemsize
        while True:
            data, stamp = _read_bytes(file, first, last)
            if stamp == self.stamps[shard] and len(data) == last - first:
                return np.frombuffer(data, dtype)
            try:
                check_shard(self.shards[shard], self.dtype, self.folder)
            except UserError as error:
                raise ChangedData(f"the data changed while the run read them: {error}") from None
            self.stamps[shard] = stamp  # only touched, or copied from the same


Stamp = tuple[int, int] | None  # a file's size and time of the last write; None: it cannot be read


def _stamp(file: str | int) -> Stamp:
    try:
        stat = os.stat(file)
        return stat.st_size, stat.st_mtime_ns
    except OSError:
        return None


def _read_bytes(file: str, begin: int, end: int) -> tuple[bytes, Stamp]:
    """Return bytes [begin, end) of a file, or as many as there are, and its stamp after that."""
    try:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            return os.pread(descriptor, end - begin, begin), _stamp(descriptor)
        finally:
            os.close(descriptor)
    except OSError:
        return b"", None


def window_of_sample(sample: int, n_windows: int, seed: int) -> int:
    """Return the window that sample number `sample` of a run reads.

    Each epoch is a seeded permutation of all windows. It needs no table: a Feistel network over the
    next power of four permutes more numbers than there are windows, and is applied again until it
    gives one of them ("cycle walking", Black and Rogaway 2002).
    """
    epoch, number = divmod(sample, n_windows)
    half = max(1, ((n_windows - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    key = hashlib.blake2b(f"{seed}/{epoch}".encode(), digest_size=64).digest()
    round_keys = [int.from_bytes(key[place : place + 8], "big") for place in range(0, 64, 8)]
    while True:
        left, right = number >> half, number & mask
        for round_key in round_keys:
            left, right = right, left ^ (_mix(right ^ round_key) & mask)
        number = left << half | right
        if number < n_windows:
            return number


def _mix(x: int) -> int:
    """Return a 64-bit hash of an integer (the finaliser of SplitMix64, Steele et al. 2014)."""
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    x = (x ^ x >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    return x ^ x >> 31


class GlobalOrder(Sampler[list[int]]):
    """This rank's microbatches of windows, step after step, without end.

    They begin at global sample `position`. A step takes the next `global_batch_size` samples. Of R
    ranks, rank r takes the r-th of R equal runs of them.
    """

    def __init__(
        self,
        n_windows: int,
        seed: int,
        position: int,
        global_batch_size: int,
        microbatch_size: int,
        rank: int,
        ranks: int,
    ) -> None:
        self.n_windows, self.seed, self.position = n_windows, seed, position
        self.global_batch_size, self.microbatch_size = global_batch_size, microbatch_size
        self.rank, self.ranks = rank, ranks

    def __iter__(self) -> Iterator[list[int]]:
        share = self.global_batch_size // self.ranks
        first = self.position + self.rank * share
        while True:
            for begin in range(first, first + share, self.microbatch_size):
                yield [
                    window_of_sample(sample, self.n_windows, self.seed)
                    for sample in range(begin, begin + self.microbatch_size)
                ]
            first += self.global_batch_size


class Loader:
    """Batches of the training split in the global order.

    Its whole state is `position`, the number of samples consumed so far. Each optimizer step takes
    one `step()`: this rank's microbatches, token ids [m, T + 1], int64.
    """

    def __init__(
        self,
        windows: Windows,
        *,
        seed: int,
        global_batch_size: int,
        microbatch_size: int,
        rank: int,
        ranks: int,
        num_workers: int,
        pin_memory: bool = False,
    ) -> None:
        self.windows, self.seed = windows, seed
        self.global_batch_size, self.microbatch_size = global_batch_size, microbatch_size
        self.rank, self.ranks = rank, ranks
        self.num_workers, self.pin_memory = num_workers, pin_memory
        self.position = 0
        self.changed: ChangedData | None = None
        """The shard that changed while the run read it. The batches are zeros then."""
        self._batches: Iterator[Tensor] | None = None
        self._peeked: list[Tensor] | None = None

    @property
    def epoch(self) -> int:
        """How many times all windows have been read."""
        return self.position // len(self.windows)

    def seek(self, position: int) -> None:
        """Go on from global sample number `position`, as a run on any layout left it."""
        self.position = position
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
                self._peeked = [next(self._stream()) for _ in range(count)]
            except ChangedData as error:
                # What a worker has raised comes with the traceback before its message.
                self.changed = ChangedData(str(error).rpartition("ChangedData: ")[2].strip())
                # The frames and the workers refer to each other. Workers whose end is left to the
                # garbage collector do not end.
                error.with_traceback(None)
                self.close()
                shape = self.microbatch_size, self.windows.seq_len + 1
                self._peeked = [torch.zeros(shape, dtype=torch.int64)] * count
        return self._peeked

    def _stream(self) -> Iterator[Tensor]:
        if self._batches is None:
            order = GlobalOrder(
                len(self.windows),
                self.seed,
                self.position,
                self.global_batch_size,
                self.microbatch_size,
                self.rank,
                self.ranks,
            )
            with warnings.catch_warnings():  # torchdata 0.11 calls what torch 2.13 deprecates
                warnings.filterwarnings("ignore", message=".*set_vital.*")
                # A generator of its own: a start of the loader must not draw from that of dropout.
                self._batches = iter(
                    StatefulDataLoader(
                        self.windows,
                        batch_sampler=order,
                        num_workers=self.num_workers,
                        pin_memory=self.pin_memory,
                        generator=torch.Generator(),
                        worker_init_fn=ignore_stop_signals,
                    )
                )
        return self._batches


def validation_batches(
    windows: Windows, count: int, batch_size: int, rank: int, ranks: int
) -> Iterator[tuple[Tensor, int]]:
    """Yield this rank's share of `count` windows spread evenly over a split.

    Each item is (token ids [batch_size, T + 1], how many of the rows count). Every rank gets the
    same number of batches, since a sharded forward pass needs all ranks: what is missing is filled
    with repetitions that do not count. A split with fewer windows than `count` gives all it has.
    """
    count = min(count, len(windows))
    chosen = [index * len(windows) // count for index in range(count)]
    stride = batch_size * ranks
    for begin in range(0, count, stride):
        mine = chosen[begin + rank * batch_size : begin + (rank + 1) * batch_size]
        padded = (mine + [chosen[0]] * batch_size)[:batch_size]
        yield torch.stack([windows[window] for window in padded]), len(mine)
