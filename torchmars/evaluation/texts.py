"""How well a model predicts texts: loss, perplexity, bits per byte."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchmars.core.errors import UserError
from torchmars.core.files import LARGEST, read_bytes
from torchmars.core.tables import table
from torchmars.data.documents import Damage, decode, texts_of
from torchmars.data.files import matches
from torchmars.data.manifest import read_manifest
from torchmars.data.windows import Windows
from torchmars.evaluation.scoring import Report, Scorer, Tokens

CHUNK = 1024  # windows whose token ids are in memory at once


@dataclass(frozen=True)
class TextResult:
    """How well a model predicts the tokens of texts."""

    text: str
    tokens: int
    bytes: int
    """Of what the tokens stand for, in UTF-8."""
    nats: float
    """The negative log-likelihood of all tokens."""

    @property
    def loss(self) -> float:
        """Nats per token."""
        return self.nats / self.tokens

    @property
    def perplexity(self) -> float:
        """The exponential of the loss."""
        return math.exp(min(self.loss, 700.0))

    @property
    def bits_per_byte(self) -> float:
        """What does not depend on the tokenizer."""
        return self.nats / math.log(2) / self.bytes if self.bytes else math.nan

    def measures(self) -> dict[str, float]:
        """Return what was measured, by name."""
        names = ("tokens", "bytes", "loss", "perplexity", "bits_per_byte")
        return {name: getattr(self, name) for name in names}


class ShardWindows(Sequence[Tokens]):
    """The windows of the validation split in a folder of shards, read when they are asked for.

    The first token of the split is not scored, nor are those after the last whole window.
    """

    def __init__(self, folder: Path, scorer: Scorer) -> None:
        """Raises `UserError` for shards of another vocabulary, and for too few tokens."""
        manifest, vocabulary = read_manifest(folder), scorer.tokenizer.vocab_size
        split = manifest.splits["validation"]
        if manifest.vocab_size != vocabulary or split.max_token >= vocabulary:
            raise UserError(
                f"{folder} has tokens of {manifest.tokenizer}, {manifest.vocab_size:,} different "
                f"ones, and the model's tokenizer has {vocabulary:,}: prepare the text for it"
            )
        self.windows = Windows(folder, split, manifest.dtype, scorer.seq_len)
        if not len(self.windows):
            raise UserError(
                f"the validation split of {folder} has no {scorer.seq_len + 1:,} tokens"
            )

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, number: Any) -> Any:
        """Return a window. Raises `ChangedData`."""
        return Tokens(self.windows[number].tolist(), self.windows.seq_len)


def windows_of_files(pattern: str, scorer: Scorer) -> list[Tokens]:
    """Return the windows of the text files that a path, a folder or a glob names.

    A line `<|endoftext|>` ends a document. Raises `UserError`.
    """
    windows: list[Tokens] = []
    for file in matches(pattern, "text", "--text").told(scorer.layout.say):
        try:
            for _, content in texts_of(read_bytes(file), LARGEST):
                text = decode(content) if isinstance(content, bytes) else ""
                windows += scorer.windows(text) if text.strip() else []
        except (OSError, Damage) as error:
            raise UserError(f"--text: cannot read {file}: {error}") from None
    if not windows:
        raise UserError(f"--text: {pattern} has no text")
    return windows


def measure(
    scorer: Scorer, name: str, windows: Sequence[Tokens], count: int, report: Report
) -> TextResult:
    """Return how well a model predicts the first `count` of the windows of a text.

    `report` is told how many windows were scored.
    """
    tokens = size = 0
    nats = 0.0
    for begin in range(0, count, CHUNK):
        chunk = [windows[number] for number in range(begin, min(begin + CHUNK, count))]
        scored = [token for window in chunk for token in window.ids[-window.count :]]
        tokens += len(scored)
        size += len(scorer.tokenizer.decode(scored).encode())
        nats -= sum(score.log_likelihood for score in scorer.score_tokens(chunk, report))
    return TextResult(name, tokens, size, nats)


def texts_table(results: Sequence[TextResult]) -> list[str]:
    """Return the lines of a table of results."""
    heads = ("text", "tokens", "bytes", "loss", "perplexity", "bits per byte")
    rows = [
        (
            each.text,
            f"{each.tokens:,}",
            f"{each.bytes:,}",
            f"{each.loss:.4f}",
            f"{each.perplexity:.2f}",
            f"{each.bits_per_byte:.4f}",
        )
        for each in results
    ]
    return table([heads, *rows])
