"""Packed windows: which spans of shards make each, kept in a file beside the shards.

`best_fit-T/` has, for each shard, a file that is named after the shard's SHA-256. It begins with
the SHA-256 of what it was made from and of its content. Its content are int64, little-endian: for
each window the number of its first span, and the number of all spans; then, for each span, its
first token in the shard, and how many inputs it has. See packing.py.
"""

import hashlib
import os
import socket
from array import array
from bisect import bisect_right
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path

import numpy as np
from tqdm import tqdm

from torchmars.core.errors import file_errors
from torchmars.core.files import PARTIAL, write_durably
from torchmars.data.manifest import SPLITS, DataManifest, Shard, Split, TokenDtype
from torchmars.data.packing import best_fit_windows
from torchmars.data.shards import Level, check_shard, count_windows
from torchmars.data.windows import ReadFile, Windows
from torchmars.models.documents import begins

# The order of windows follows from it, so whatever changes them makes another method.
METHOD = "best_fit"
DIGEST = hashlib.sha256().digest_size
NUMBER = np.dtype("<i8")
CHUNK = 2**24  # tokens that are searched for documents at once


class PackedWindows(Windows):
    """The windows of a split whose shards `pack_shards` has packed.

    Each shard has windows of its own.
    """

    def __init__(self, folder: Path, split: Split, dtype: TokenDtype, seq_len: int) -> None:
        super().__init__(folder, split, dtype, seq_len)
        self.packings = [
            ReadFile(packing_file(folder, shard, seq_len), "start the run again, which mends it")
            for shard in split.shards
        ]
        counts = (count_windows(shard.tokens, seq_len) for shard in split.shards)
        self.firsts = list(accumulate(counts, initial=0))

    def __len__(self) -> int:
        return self.firsts[-1]

    def __getitem__(self, window: int) -> np.ndarray:
        """Return token ids [T + 1] in the shards' dtype. Raises `UserError` of a failed read."""
        shard = bisect_right(self.firsts, window) - 1
        first, last = self.firsts[shard : shard + 2]
        begin, end = self._numbers(shard, window - first, 2)
        numbers = self._numbers(shard, last - first + 1 + 2 * begin, 2 * (end - begin))
        spans = [(start, start + size) for start, size in zip(numbers[::2], numbers[1::2])]
        spans[-1] = spans[-1][0], spans[-1][1] + 1  # the last target
        return self.read(shard, *spans)

    def _numbers(self, shard: int, first: int, count: int) -> list[int]:
        """Return numbers of the packing of a shard. Raises `UserError` of a failed read."""
        data = self.packings[shard].read(DIGEST + first * NUMBER.itemsize, count * NUMBER.itemsize)
        return np.frombuffer(data, NUMBER).tolist()


def pack_shards(folder: Path, manifest: DataManifest, seq_len: int, level: Level = "full") -> None:
    """Pack the shards of all splits, those whose packing is missing or damaged.

    The level "full" reads every byte of a packing; the others look at its size. Raises `UserError`
    for a shard that is damaged, and where the folder cannot be written to.
    """
    begin = manifest.begin_token
    border = [manifest.end_of_text, *([] if begin is None else [begin])]
    splits = [Windows(folder, manifest.splits[name], manifest.dtype, seq_len) for name in SPLITS]
    found = [(windows, number) for windows in splits for number in range(len(windows.shards))]
    with ThreadPoolExecutor() as pool:  # hashing releases the interpreter lock
        good = pool.map(
            lambda each: is_good(folder, each[0].shards[each[1]], seq_len, border, level), found
        )
        missing = [each for each, done in zip(found, good) if not done]
    for windows, number in tqdm(missing, "packing", unit=" shards", disable=not missing):
        shard = windows.shards[number]
        check_shard(shard, windows.split, manifest.dtype, folder)
        content = packing(windows, number, *border)
        data = digest(content, shard, seq_len, border) + content
        file = packing_file(folder, shard, seq_len)
        with file_errors(
            f"cannot write {file}",
            'data.packing = "best_fit" needs a data.path that you can write to, once for each '
            "training.seq_len",
        ):
            file.parent.mkdir(exist_ok=True)
            # Other machines may write the same one.
            write_durably(file, data, f".{socket.gethostname()}-{os.getpid()}{PARTIAL}")


def packing_file(folder: Path, shard: Shard, seq_len: int) -> Path:
    """Return where the packing of a shard is."""
    return folder / f"{METHOD}-{seq_len}" / f"{shard.sha256}.bin"


def is_good(folder: Path, shard: Shard, seq_len: int, border: list[int], level: Level) -> bool:
    """Return whether the packing of a shard is there, whole, and of that shard."""
    file = packing_file(folder, shard, seq_len)
    try:
        if level != "full":
            windows = count_windows(shard.tokens, seq_len)
            end = DIGEST + (windows + 1) * NUMBER.itemsize
            [spans] = np.fromfile(file, NUMBER, count=1, offset=end - NUMBER.itemsize)
            return file.stat().st_size == end + 2 * spans * NUMBER.itemsize
        data = file.read_bytes()
    except (OSError, ValueError):  # it is not there, or too short
        return False
    return data[:DIGEST] == digest(data[DIGEST:], shard, seq_len, border)


def digest(content: bytes, shard: Shard, seq_len: int, border: list[int]) -> bytes:
    """Return the SHA-256 of a packing and of its sources."""
    origin = f"{METHOD} {shard.sha256} {shard.tokens} {seq_len} {' '.join(map(str, border))}\n"
    return hashlib.sha256(origin.encode() + content).digest()


def packing(
    windows: Windows, number: int, end_of_text: int, begin_token: int | None = None
) -> bytes:
    """Return the packing of a shard, found by reading all of it."""
    tokens = windows.shards[number].tokens
    found = []
    for first in range(0, tokens, CHUNK):
        before = min(first, 1)  # the token before tells whether a document begins
        chunk = windows.read(number, (first - before, min(first + CHUNK, tokens)))
        found.append(first + np.flatnonzero(begins(chunk, end_of_text, begin_token)[before:]))
    firsts, spans = array("q", [0]), array("q")
    for window in best_fit_windows(np.concatenate(found), tokens, windows.seq_len):
        for span in window:
            spans.extend(span)
        firsts.append(len(spans) // 2)
    return np.concatenate([firsts, spans]).astype(NUMBER).tobytes()
