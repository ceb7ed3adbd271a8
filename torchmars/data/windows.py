"""The windows of a run: how a sample is defined and read, as a stream or by best-fit packing.

Best-fit packing fills windows with documents that fit, so that few documents are cut.

Source: Ding et al. 2024, "Fewer Truncations Improve Language Modeling", arXiv 2404.10830. Theirs
leaves padding in windows. Here all windows are full: a gap that no document fits is filled by
cutting one.

A document's tokens as inputs are the end-of-text token before it and all of its own. Their targets
are its own tokens and the end-of-text token after it. Where documents begin with a token of their
own, they go from that token to the end-of-text token, and the target of that one is the next such
token. So documents can follow each other in a window in any order, and every target is the token
that follows in the shard.

The result lies beside the shards: `best_fit-T/` has, for each shard, a file that is named after the
shard's SHA-256, of int64, little-endian: for each window the number of its first span, and the
number of all spans; then, for each span, its first token in the shard, and how many inputs it has.
"""

import hashlib
import io
import math
import os
from array import array
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from torchmars.config.data import Packing
from torchmars.core.errors import UserError, file_errors
from torchmars.core.files import PARTIAL, write_durably
from torchmars.data.manifest import (
    REMEDY,
    SPLITS,
    DataManifest,
    Level,
    Shard,
    Split,
    TokenDtype,
    check_shard,
    check_shards,
    numpy_dtype,
)
from torchmars.data.order import Place, shares_from_start
from torchmars.models.documents import begins

# The order of windows follows from it, so whatever changes them makes another method.
METHOD = "best_fit"
REMOVE = "remove it and start the run again"
NUMBER = np.dtype("<i8")
CHUNK = 2**24  # tokens that are searched for documents at once
Span = tuple[int, int]  # the first of some inputs in a shard, and how many there are


@dataclass(frozen=True, eq=False)
class Numbers:
    """The numbers of a file from byte `offset` on. Mapped memory could end in a bus error."""

    path: Path
    remedy: str
    dtype: np.dtype
    offset: int = 0

    def read(self, *spans: tuple[int, int]) -> np.ndarray:
        """Return numbers [begin, end) of spans, end to end. Raises `UserError` with the place."""
        size, first, data = self.dtype.itemsize, self.offset, []
        try:
            file = opened(self)  # stays open in the read, while another thread opens others
            for begin, end in spans:
                first = self.offset + begin * size
                data.append(os.pread(file.fileno(), (end - begin) * size, first))
                if len(data[-1]) < (end - begin) * size:
                    raise OSError("it is cut short")
        except OSError as error:
            reason = f"byte {first} ({error.strerror or error})"
            raise UserError(f"{self.path} cannot be read at {reason}: {self.remedy}") from None
        return np.frombuffer(b"".join(data), self.dtype)


@lru_cache(maxsize=256)  # of all corpora: a process may have 1,024 by default
def opened(file: Numbers) -> io.FileIO:
    """Return the open file, which stays open until so many others have been read after it."""
    return io.FileIO(file.path)


class Windows:
    """The windows of a split: samples of T + 1 tokens (T = `seq_len`).

    Window w is tokens [w T, w T + T + 1) of the shards, end to end. The one token of overlap makes
    every token but the first a target once.
    """

    def __init__(self, folder: Path, split: Split, dtype: TokenDtype, seq_len: int) -> None:
        self.seq_len, self.shards = seq_len, split.shards
        remedy, kind = REMEDY.format(folder), numpy_dtype(dtype)
        self.files = [
            Numbers(folder / each.file, remedy, kind, each.offset) for each in self.shards
        ]
        self.starts = list(accumulate((shard.tokens for shard in split.shards), initial=0))

    def __len__(self) -> int:
        return max(0, self.starts[-1] - 1) // self.seq_len

    def __getitem__(self, window: int) -> np.ndarray:
        """Return token ids [T + 1] in the shards' dtype. Raises `UserError` of a failed read."""
        begin, end = window * self.seq_len, (window + 1) * self.seq_len + 1
        parts = []
        for shard in range(bisect_right(self.starts, begin) - 1, bisect_left(self.starts, end)):
            first, last = self.starts[shard : shard + 2]
            span = max(begin, first) - first, min(end, last) - first
            parts.append(self.files[shard].read(span))
        return np.concatenate(parts)


class PackedWindows(Windows):
    """The windows of a split that `pack_shards` has packed. Each shard has windows of its own."""

    def __init__(self, folder: Path, split: Split, dtype: TokenDtype, seq_len: int) -> None:
        super().__init__(folder, split, dtype, seq_len)
        self.packings = [
            Numbers(packing_file(folder, shard, seq_len), REMOVE, NUMBER) for shard in split.shards
        ]
        counts = ((shard.tokens - 1) // seq_len for shard in split.shards)
        self.firsts = list(accumulate(counts, initial=0))

    def __len__(self) -> int:
        return self.firsts[-1]

    def __getitem__(self, window: int) -> np.ndarray:
        """Return token ids [T + 1] in the shards' dtype. Raises `UserError` of a failed read."""
        shard = bisect_right(self.firsts, window) - 1
        first, last = self.firsts[shard : shard + 2]
        packing, after = self.packings[shard], last - first + 1
        begin, end = packing.read((window - first, window - first + 2)).tolist()
        spans = packing.read((after + 2 * begin, after + 2 * end)).reshape(-1, 2).tolist()
        spans[-1][1] += 1  # the last target
        return self.files[shard].read(*((start, start + size) for start, size in spans))


def pack_shards(folder: Path, manifest: DataManifest, seq_len: int) -> None:
    """Pack the shards of all splits that are not packed.

    Raises `UserError` for a shard that is damaged, and where the folder cannot be written to.
    """
    splits = [Windows(folder, manifest.splits[name], manifest.dtype, seq_len) for name in SPLITS]
    missing = [
        (windows, number, file)
        for windows in splits
        for number, shard in enumerate(windows.shards)
        if not (file := packing_file(folder, shard, seq_len)).exists()
    ]
    for windows, number, file in tqdm(missing, "packing", unit=" shards", disable=not missing):
        check_shard(windows.shards[number], manifest.dtype, folder)
        content = packing(windows, number, manifest)
        with file_errors(f"cannot write {file}", "set data.path to a folder you can write"):
            file.parent.mkdir(exist_ok=True)
            # Other processes may write the same one.
            write_durably(file, content, f".{os.urandom(8).hex()}{PARTIAL}")


def packing_file(folder: Path, shard: Shard, seq_len: int) -> Path:
    """Return where the packing of a shard is."""
    return folder / f"{METHOD}-{seq_len}" / f"{shard.sha256}.spans"


def packing(windows: Windows, number: int, manifest: DataManifest) -> bytes:
    """Return the packing of a shard, found by reading all of it."""
    tokens, border = windows.shards[number].tokens, (manifest.end_of_text, manifest.begin_token)
    found = []
    for first in range(0, tokens, CHUNK):
        before = min(first, 1)  # the token before tells whether a document begins
        chunk = windows.files[number].read((first - before, min(first + CHUNK, tokens)))
        found.append(first + np.flatnonzero(begins(chunk, *border)[before:]))
    firsts, spans = array("q", [0]), array("q")
    for window in best_fit_windows(np.concatenate(found), tokens, windows.seq_len):
        for span in window:
            spans.extend(span)
        firsts.append(len(spans) // 2)
    return np.concatenate([firsts, spans]).astype(NUMBER).tobytes()


def best_fit_windows(begins: np.ndarray, tokens: int, seq_len: int) -> Iterator[list[Span]]:
    """Yield the windows of a shard of `tokens` tokens: spans of `seq_len` inputs in all.

    `begins` are the places where its documents begin, sorted. Only the first span of a window may
    begin inside a document, and only the last one may end inside one. No input is in two spans.
    Less than `seq_len` are in none, so the number of windows is `(tokens - 1) // seq_len`.
    """
    if not len(begins):
        yield from alone(0, tokens - 1, seq_len)
        return
    # A shard may begin inside a document, and end inside one. The end of a window is the only place
    # for that one, so it is kept for the last gap.
    rest, last = (0, int(begins[0])), (int(begins[-1]), tokens - 1 - int(begins[-1]))
    whole = WholeDocuments(begins[:-1], np.diff(begins), seq_len)
    window: list[Span] = []
    gap = 0
    while rest[1] or whole.left:
        start, length = rest if rest[1] else whole.take(whole.longest)
        yield from alone(start, length, seq_len)
        rest, left = (0, 0), length % seq_len
        if not left:
            continue
        window, gap = [(start + length - left, left)], seq_len - left
        while gap and (fitting := whole.best_fit(gap)):
            window.append(whole.take(fitting))
            gap -= fitting
        if gap and whole.left:
            start, length = whole.take(whole.longest)
            window.append((start, gap))
            rest, gap = (start + gap, length - gap), 0
        if not gap:
            yield window
    start, length = last
    if gap > length:
        return
    if gap:
        yield [*window, (start, gap)]
    yield from alone(start + gap, length - gap, seq_len)


def alone(start: int, length: int, seq_len: int) -> Iterator[list[Span]]:
    """Yield the windows that some inputs fill without others."""
    for first in range(start, start + length - seq_len + 1, seq_len):
        yield [(first, seq_len)]


class WholeDocuments:
    """The whole documents of a shard that are not packed yet, by length."""

    def __init__(self, starts: np.ndarray, lengths: np.ndarray, seq_len: int) -> None:
        self.seq_len, self.left = seq_len, len(lengths)
        self.starts = defaultdict[int, list[int]](list)
        for start, length in zip(starts.tolist(), lengths.tolist()):
            self.starts[length].append(start)
        self.long = sorted(length for length in self.starts if length > seq_len)
        # Sets of lengths as the bits of an integer, whose operations are fast: bit n of `present`
        # says whether there is a document of length n, and bit seq_len - n of `mirrored` too.
        self.present = self.mirrored = 0
        for length in self.starts:
            if length <= seq_len:
                self._toggle(length)

    @property
    def longest(self) -> int:
        """The length of the longest document that is left."""
        return self.long[-1] if self.long else self.present.bit_length() - 1

    def best_fit(self, gap: int) -> int:
        """Return the length of the document to put into a gap; 0 if none fits.

        It is the one that fills the gap; else the longest that fills it with one more; else the
        longest that fits.
        """
        if self.present >> gap & 1:
            return gap
        pairs = self.present & self.mirrored >> (self.seq_len - gap)
        half, odd = divmod(gap, 2)
        if not odd and len(self.starts[half]) == 1:
            pairs &= ~(1 << half)
        fitting = pairs or self.present & (1 << gap) - 1
        return max(0, fitting.bit_length() - 1)

    def take(self, length: int) -> Span:
        """Take out a document of a length; return its inputs."""
        start = self.starts[length].pop()
        if not self.starts[length]:
            if length > self.seq_len:
                self.long.pop()
            else:
                self._toggle(length)
        self.left -= 1
        return start, length

    def _toggle(self, length: int) -> None:
        self.present ^= 1 << length
        self.mirrored ^= 1 << (self.seq_len - length)


class MixedWindows:
    """The windows of a split of all parts."""

    def __init__(self, parts: Sequence[Windows]) -> None:
        self.parts, self.seq_len = parts, parts[0].seq_len
        self.lengths = [len(windows) for windows in parts]

    def batch(self, places: Sequence[Place], pinned: bool = False) -> Tensor:
        """Return token ids [m, T + 1], int64, of windows by part and number.

        `pinned`: in memory that a GPU copies from by itself. Raises `UserError` of a failed read.
        """
        shape = len(places), self.seq_len + 1
        tokens = torch.empty(shape, dtype=torch.int64, pin_memory=pinned)
        for row, (part, window) in zip(tokens.numpy(), places):
            row[:] = self.parts[part][window]
        return tokens


@dataclass
class MixturePart:
    """One corpus of a run."""

    name: str
    folder: Path
    """Where its manifest is."""
    weight: float
    manifest: DataManifest


@dataclass
class Mixture:
    """The corpora of a run, prepared. Most runs have one."""

    parts: list[MixturePart]
    packing: Packing = "stream"
    """How windows are filled, as data.packing says."""

    @property
    def vocab_size(self) -> int:
        """The vocabulary of the tokenizer, which all parts share."""
        return self.parts[0].manifest.vocab_size

    @property
    def weights(self) -> list[float]:
        """The weight of each part."""
        return [part.weight for part in self.parts]

    @property
    def names(self) -> list[str]:
        """The name of each part in a report; nothing if there is only one."""
        return [part.name for part in self.parts] if len(self.parts) > 1 else []

    def bits_per_byte(self, split: str, loss: float, shares: Sequence[float]) -> float:
        """Return a loss, in nats per token, in bits per byte of text.

        It is over tokens of a split of each part, in these shares, which need not add up to 1.
        A token has the bytes of the mean token of its part's split. NaN where a part does not know
        them.
        """
        size = 0.0
        for part, share in zip(self.parts, shares):
            if share:
                found = part.manifest.splits[split]
                size += share * (found.text_bytes or math.nan) / found.tokens
        return loss / math.log(2) * sum(shares) / size

    def fingerprint(self) -> str:
        """Return a hash of the training tokens of all parts, and of their order."""
        splits = [part.manifest.splits["train"] for part in self.parts]
        shards = "".join(shard.sha256 for split in splits for shard in split.shards)
        return hashlib.sha256(shards.encode()).hexdigest()

    def check(self, rows: int, seq_len: int, global_batch_size: int) -> None:
        """Raise `UserError` for a part that a run cannot read.

        That is one with tokens beyond a token table of `rows` rows, or with too few windows: the
        training split needs one for each sample that it gives to a global batch, validation one.
        """
        samples = shares_from_start(self.weights).counts(global_batch_size)
        for part, count in zip(self.parts, samples):
            splits, least = part.manifest.splits, max(count, 1)
            largest = max(split.max_token for split in splits.values())
            if largest >= rows:
                raise UserError(
                    f"{part.folder} has token id {largest}, beyond model.vocab_size = {rows}: set "
                    f"model.vocab_size to at least {part.manifest.vocab_size}, or leave it out"
                )
            for name, needed, remedy in (
                ("train", least, "lower training.global_batch_size"),
                ("validation", 1, "prepare it again with a higher data.validation_fraction"),
            ):
                if len(self._windows(part, name, seq_len)) < needed:
                    raise UserError(
                        f"the {name} split of {part.folder} is too small: {splits[name].tokens:,} "
                        f"tokens, and a step needs {needed} x {seq_len}: add text, lower "
                        f"training.seq_len, or {remedy}"
                    )

    def pack(self, seq_len: int) -> None:
        """Pack the shards of all parts, if they are to be packed. Raises `UserError`."""
        if self.packing == METHOD:
            for part in self.parts:
                pack_shards(part.folder, part.manifest, seq_len)

    def verify(self, level: Level, rank: int = 0, ranks: int = 1) -> None:
        """Raise `UserError` naming the first shard that is missing, truncated or altered.

        Each of several `ranks` checks some of them.
        """
        for part in self.parts:
            check_shards(part.manifest, part.folder, rank, ranks, level)

    def windows(self, split: str, seq_len: int) -> MixedWindows:
        """Open the windows of a split of all parts."""
        return MixedWindows([self._windows(part, split, seq_len) for part in self.parts])

    def _windows(self, part: MixturePart, split: str, seq_len: int) -> Windows:
        """Return the windows of a split of a part, of which nothing is read yet."""
        kind = PackedWindows if self.packing == METHOD else Windows
        return kind(part.folder, part.manifest.splits[split], part.manifest.dtype, seq_len)
