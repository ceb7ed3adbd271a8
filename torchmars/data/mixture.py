"""A run's corpora: one, or several with weights, and which of them each sample is read from."""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal

from torch import Tensor
from torch.utils.data import Dataset

from torchmars.config.data import Packing
from torchmars.core.bounds import Range
from torchmars.data.manifest import DataManifest
from torchmars.data.packed import METHOD as PACKED
from torchmars.data.packed import PackedWindows, pack_shards
from torchmars.data.shards import Level, check_shards, check_size, check_vocabulary
from torchmars.data.tokenizer import Tokenizer
from torchmars.data.windows import Windows


@dataclass(frozen=True)
class Shares:
    """Deals the samples of a run to the parts of its mixture by their weights.

    It needs no table. The first part takes sample i wherever floor((i + 1) p) > floor(i p), p being
    its share (Bresenham's line); the second takes, of the samples that are left, its share of what
    is left, and so on. So at every i each part has its share up to a few samples. Weights count
    as the decimal fractions that they are written as.
    """

    weights: list[Annotated[float, Range(0, 1e9)]] = field(default_factory=lambda: [1.0])
    """Of each part. At least one is above 0."""
    start: Annotated[int, Range(0, 2**63 - 1)] = 0
    """The first sample that these weights deal."""
    before: list[Annotated[int, Range(0, 2**63 - 1)]] = field(default_factory=lambda: [0])
    """The samples of each part before that one."""

    def part_of(self, sample: int) -> tuple[int, int]:
        """Return the part that a sample is of, and its number among the samples of that part.

        `sample` is at least `start`.
        """
        before, after = self.counts(sample), self.counts(sample + 1)
        part = next(part for part in range(len(before)) if after[part] > before[part])
        return part, before[part]

    def counts(self, sample: int) -> list[int]:
        """Return how many samples of each part come before a sample, which is at least `start`."""
        left, result = sample - self.start, []
        for before, share in zip(self.before, self._shares):
            taken = left * share.numerator // share.denominator
            result.append(before + taken)
            left -= taken
        return result

    def changed(self, weights: Sequence[float], sample: int) -> "Shares":
        """Return the shares of a run that resumes with `weights` from a sample.

        They are these themselves where no share changes.
        """
        if _exact(weights) == _exact(self.weights):
            return self
        return Shares(list(weights), sample, self.counts(sample))

    @cached_property
    def _shares(self) -> list[Fraction]:
        """Each part's share of the samples that the parts before it leave."""
        exact = _exact(self.weights)
        left = [sum(exact[part:], Fraction(0)) for part in range(len(exact))]
        return [weight / rest if rest else Fraction(0) for weight, rest in zip(exact, left)]


def shares_from_start(weights: Sequence[float]) -> Shares:
    """Return the shares of a run that begins with `weights`."""
    return Shares(list(weights), 0, [0] * len(weights))


def _exact(weights: Sequence[float]) -> list[Fraction]:
    """Return weights as fractions that add up to 1."""
    fractions = [Fraction(str(weight)) for weight in weights]
    total = sum(fractions)
    return [fraction / total for fraction in fractions]


class MixedWindows(Dataset):
    """The windows of a split of all parts, by part and window."""

    def __init__(self, parts: Sequence[Windows]) -> None:
        self.parts, self.seq_len = parts, parts[0].seq_len
        self.lengths = [len(windows) for windows in parts]

    def __getitem__(self, place: tuple[int, int]) -> Tensor:
        """Return token ids [T + 1], int64. Raises `ChangedData`."""
        part, window = place
        return self.parts[part][window]


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
    def tokenizer_sha256(self) -> str | None:
        """The SHA-256 of the file of that tokenizer; None for one that has a name."""
        return self.parts[0].manifest.tokenizer_sha256

    @property
    def weights(self) -> list[float]:
        """The weight of each part."""
        return [part.weight for part in self.parts]

    @property
    def names(self) -> list[str]:
        """The name of each part in a report; nothing if there is only one."""
        return [part.name for part in self.parts] if len(self.parts) > 1 else []

    def bits_per_byte(
        self, split: Literal["train", "validation"], loss: float, shares: Sequence[float]
    ) -> float:
        """Return a loss, in nats per token, in bits per byte of text.

        It is over tokens of a split of each part, in these shares, which need not add up to 1.
        A token has the bytes of the mean token of its part's split. NaN where a part does not know
        them.
        """
        size = 0.0
        for part, share in zip(self.parts, shares):
            if share:
                known = part.manifest.text_bytes.get(split, 0) or math.nan
                size += share * known / part.manifest.splits[split].tokens
        return loss / math.log(2) * sum(shares) / size

    def fingerprint(self) -> str:
        """Return a hash of the training tokens of all parts, and of their order."""
        prints = [part.manifest.fingerprint() for part in self.parts]
        if len(prints) == 1:
            return prints[0]
        return hashlib.sha256("".join(prints).encode()).hexdigest()

    def check(self, rows: int, seq_len: int, global_batch_size: int) -> None:
        """Raise `UserError` for a part that a run cannot read.

        That is one with tokens beyond a token table of `rows` rows, or with too few.
        """
        samples = shares_from_start(self.weights).counts(global_batch_size)
        for part, count in zip(self.parts, samples):
            check_vocabulary(part.manifest, rows, part.folder)
            packed = self.packing == PACKED
            check_size(part.manifest, seq_len, max(count, 1), part.folder, packed)

    def pack(self, seq_len: int, tokenizer: Tokenizer, level: Level) -> None:
        """Pack the shards of all parts, if they are to be packed. Raises `UserError`.

        `level` says how existing packings are checked.
        """
        if self.packing == PACKED:
            for part in self.parts:
                pack_shards(part.folder, part.manifest, seq_len, tokenizer.end_of_text, level)

    def verify(self, level: Level, rank: int = 0, ranks: int = 1) -> None:
        """Raise `UserError` naming the first shard that is missing, truncated or altered.

        Each of several `ranks` checks some of them.
        """
        for part in self.parts:
            check_shards(part.manifest, part.folder, rank, ranks, level)

    def windows(self, split: Literal["train", "validation"], seq_len: int) -> MixedWindows:
        """Open the windows of a split of all parts."""
        kind = PackedWindows if self.packing == PACKED else Windows
        return MixedWindows(
            [
                kind(part.folder, part.manifest.splits[split], part.manifest.dtype, seq_len)
                for part in self.parts
            ]
        )
