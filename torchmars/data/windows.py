"""The windows of a split: how a sample is defined and read."""

import os
from bisect import bisect_left, bisect_right
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from torchmars.core.errors import UserError
from torchmars.data.manifest import Split, TokenDtype, numpy_dtype
from torchmars.data.shards import check_shard, count_windows, too_large


class ChangedData(UserError):
    """A shard has changed since the run began. The message names it."""


class Windows(Dataset):
    """The windows of a split: samples of T + 1 tokens (T = `seq_len`).

    Window w is tokens [w T, w T + T + 1) of the shards, end to end. The one token of overlap makes
    every token but the first a target once. Make this before the shards are verified: each read
    checks whether its shard has been written to since, and verifies it again if so. Shards are not
    memory-mapped: one that is cut short would end the process by a bus error.
    """

    def __init__(self, folder: Path, split: Split, dtype: TokenDtype, seq_len: int) -> None:
        self.folder, self.split, self.shards, self.dtype = folder, split, split.shards, dtype
        self.stamps = [stamp_of(str(folder / shard.file)) for shard in split.shards]
        self.starts = list(accumulate((shard.tokens for shard in split.shards), initial=0))
        self.seq_len = seq_len

    def __len__(self) -> int:
        return count_windows(self.starts[-1], self.seq_len)

    def __getitem__(self, window: int) -> Tensor:
        """Return token ids [T + 1], int64. Raises `ChangedData`."""
        begin, end = window * self.seq_len, (window + 1) * self.seq_len + 1
        parts = []
        for shard in range(bisect_right(self.starts, begin) - 1, bisect_left(self.starts, end)):
            first, last = self.starts[shard : shard + 2]
            parts.append(self.read(shard, max(begin, first) - first, min(end, last) - first))
        return torch.from_numpy(np.concatenate(parts).astype(np.int64))

    def read(self, shard: int, begin: int, end: int) -> np.ndarray:
        """Return tokens [begin, end) of a shard. Raises `ChangedData`."""
        file, dtype = str(self.folder / self.shards[shard].file), numpy_dtype(self.dtype)
        offset = self.shards[shard].offset
        first, last = offset + begin * dtype.itemsize, offset + end * dtype.itemsize
        while True:
            data, stamp = read_with_stamp(file, first, last)
            if stamp == self.stamps[shard] and len(data) == last - first:
                tokens = np.frombuffer(data, dtype)
                if tokens.max(initial=0) > self.split.max_token:
                    raise ChangedData(too_large(file, int(tokens.max()), self.split, self.folder))
                return tokens
            try:
                check_shard(self.shards[shard], self.split, self.dtype, self.folder)
            except UserError as error:
                raise ChangedData(f"the data changed while the run read them: {error}") from None
            self.stamps[shard] = stamp  # only touched, or copied from the same


Stamp = tuple[int, int] | None  # a file's size and time of the last write; None: it cannot be read


def stamp_of(file: str | int) -> Stamp:
    try:
        stat = os.stat(file)
        return stat.st_size, stat.st_mtime_ns
    except OSError:
        return None


def read_with_stamp(file: str, begin: int, end: int) -> tuple[bytes, Stamp]:
    """Return bytes [begin, end) of a file, or as many as there are, and its stamp after that."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK)  # else a FIFO is waited for
        try:
            return os.pread(descriptor, end - begin, begin), stamp_of(descriptor)
        finally:
            os.close(descriptor)
    except OSError:
        return b"", None
