"""A run's corpora: one, or several with weights."""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from torchmars.config.data import Packing
from torchmars.core.errors import UserError
from torchmars.data.manifest import DataManifest, Level, check_shards
from torchmars.data.order import Place, shares_from_start
from torchmars.data.windows import METHOD as PACKED
from torchmars.data.windows import PackedWindows, Windows, pack_shards

SplitName = Literal["train", "validation"]


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

    def bits_per_byte(self, split: SplitName, loss: float, shares: Sequence[float]) -> float:
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
        prints = [part.manifest.fingerprint() for part in self.parts]
        if len(prints) == 1:
            return prints[0]
        return hashlib.sha256("".join(prints).encode()).hexdigest()

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
        if self.packing == PACKED:
            for part in self.parts:
                pack_shards(part.folder, part.manifest, seq_len)

    def verify(self, level: Level, rank: int = 0, ranks: int = 1) -> None:
        """Raise `UserError` naming the first shard that is missing, truncated or altered.

        Each of several `ranks` checks some of them.
        """
        for part in self.parts:
            check_shards(part.manifest, part.folder, rank, ranks, level)

    def windows(self, split: SplitName, seq_len: int) -> MixedWindows:
        """Open the windows of a split of all parts."""
        return MixedWindows([self._windows(part, split, seq_len) for part in self.parts])

    def _windows(self, part: MixturePart, split: str, seq_len: int) -> Windows:
        """Return the windows of a split of a part, of which nothing is read yet."""
        kind = PackedWindows if self.packing == PACKED else Windows
        return kind(part.folder, part.manifest.splits[split], part.manifest.dtype, seq_len)
