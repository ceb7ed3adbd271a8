"""The windows of a split: how a sample is defined and read."""

import os
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from pathlib import Path

import numpy as np

from torchmars.core.errors import UserError
from torchmars.data.manifest import REMEDY, Split, TokenDtype, count_windows, numpy_dtype


@dataclass(frozen=True, eq=False)
class ReadFile:
    """A file that is read in places, and not memory-mapped: a shorter one would be a bus error."""

    path: Path
    remedy: str

    def read(self, begin: int, size: int) -> bytes:
        """Return `size` bytes from `begin` on. Raises `UserError` with file, place and remedy."""
        try:
            file = opened(self)  # stays open in the read, while another thread opens others
            data = os.pread(file.number, size, begin)
            if len(data) == size:
                return data
            reason = "it is cut short"
        except OSError as error:
            reason = str(error.strerror)
        raise UserError(f"{self.path} cannot be read at byte {begin} ({reason}): {self.remedy}")


@dataclass(frozen=True)
class Descriptor:
    """An open file, until nothing refers to this."""

    number: int

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # `os` may end before this
        close(self.number)


@lru_cache(maxsize=256)  # of all corpora: a process may have 1,024 by default
def opened(file: ReadFile) -> Descriptor:
    """Return the open file, which stays open until so many others have been read after it."""
    return Descriptor(os.open(file.path, os.O_RDONLY))


class Windows:
    """The windows of a split: samples of T + 1 tokens (T = `seq_len`).

    Window w is tokens [w T, w T + T + 1) of the shards, end to end. The one token of overlap makes
    every token but the first a target once.
    """

    def __init__(self, folder: Path, split: Split, dtype: TokenDtype, seq_len: int) -> None:
        self.folder, self.split, self.shards = folder, split, split.shards
        self.dtype, self.seq_len = numpy_dtype(dtype), seq_len
        remedy = REMEDY.format(folder)
        self.files = [ReadFile(folder / shard.file, remedy) for shard in split.shards]
        self.starts = list(accumulate((shard.tokens for shard in split.shards), initial=0))

    def __len__(self) -> int:
        return count_windows(self.starts[-1], self.seq_len)

    def __getitem__(self, window: int) -> np.ndarray:
        """Return token ids [T + 1] in the shards' dtype. Raises `UserError` of a failed read."""
        begin, end = window * self.seq_len, (window + 1) * self.seq_len + 1
        parts = []
        for shard in range(bisect_right(self.starts, begin) - 1, bisect_left(self.starts, end)):
            first, last = self.starts[shard : shard + 2]
            parts.append(self.read(shard, (max(begin, first) - first, min(end, last) - first)))
        return np.concatenate(parts)

    def read(self, shard: int, *spans: tuple[int, int]) -> np.ndarray:
        """Return tokens [begin, end) of each span of a shard, one after the other.

        Raises `UserError` of a failed read.
        """
        file, offset, size = self.files[shard], self.shards[shard].offset, self.dtype.itemsize
        data = [file.read(offset + begin * size, (end - begin) * size) for begin, end in spans]
        return np.frombuffer(b"".join(data), self.dtype)
