"""How well a model predicts texts: loss, perplexity, bits per byte."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torchmars.core.errors import UserError
from torchmars.core.files import LARGEST, read_bytes
from torchmars.core.tables import table
from torchmars.data.corpus import matching_files
from torchmars.data.documents import Damage, decode, documents_in
from torchmars.data.manifest import read_manifest
from torchmars.data.tokenizer import FileTokenizer, Tokenizer
from torchmars.data.windows import Windows
from torchmars.evaluation.sampling import UNKNOWN
from torchmars.evaluation.scoring import Report, Scorer, Tokens

CHUNK = 1024  # windows whose token ids are in memory at once
PIECE = 2**20  # tokens that are made text at once
LETTER = 4  # bytes of the longest one


@dataclass(frozen=True)
class TextResult:
    """How well a model predicts the tokens of texts."""

    text: str
    tokens: int
    bytes: int
    """Of the text that was scored, in UTF-8."""
    nats: float
    """The negative log-likelihood of all tokens."""
    decoded: bool = False
    """Whether bytes are counted from decoded tokens, because the text's own are not known."""

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
        """The measurements that do not depend on the tokenizer."""
        return self.nats / math.log(2) / self.bytes if self.bytes else math.nan

    def measures(self) -> dict[str, float]:
        """Return the measurements, by name."""
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
        self.tokenizer, self.begin_token = scorer.tokenizer, manifest.begin_token
        self.text_bytes = manifest.text_bytes.get("validation", 0)
        """Of the whole split; 0 where they were not counted."""
        self.windows = Windows(folder, split, manifest.dtype, scorer.seq_len)
        if not len(self.windows):
            raise UserError(
                f"the validation split of {folder} has no {scorer.seq_len + 1:,} tokens"
            )

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, number: Any) -> Any:
        """Return a window. Raises `UserError` of a failed read."""
        return Tokens(self.windows[number].tolist(), self.windows.seq_len)

    def own_bytes(self, tokens: int, decoded: int) -> int:
        """Return the bytes of text of so many tokens of the split, which decode to so many.

        A tokenizer of a file may lose text, and a token that begins documents may be one of text.
        All tokens share the difference of the whole split. Raises `UserError` of a failed read.
        """
        exact = not isinstance(self.tokenizer, FileTokenizer) and self.begin_token is None
        if exact or not self.text_bytes:
            return decoded
        whole = DecodedBytes(self.tokenizer)
        for number, shard in enumerate(self.windows.shards):
            for begin in range(0, shard.tokens, PIECE):
                end = min(begin + PIECE, shard.tokens)
                whole.add(self.windows.read(number, (begin, end)).tolist())
        lost = self.text_bytes - whole.total
        return decoded + lost * tokens // self.windows.split.tokens


class DecodedBytes:
    """Counts the bytes of UTF-8 that consecutive tokens decode to, some of them at a time."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.size = 0
        self.rest: list[int] = []
        """The first tokens of a letter that is not whole yet."""

    def add(self, tokens: list[int]) -> None:
        """Count the bytes of the next tokens."""
        tokens = self.rest + tokens
        ends = range(len(tokens), max(len(tokens) - LETTER, 0), -1)
        texts = ((end, self.tokenizer.decode(tokens[:end])) for end in ends)
        end = next((end for end, text in texts if not text.endswith(UNKNOWN)), len(tokens))
        self.size += self.tokenizer.decoded_bytes(tokens[:end])
        self.rest = tokens[end:]

    @property
    def total(self) -> int:
        """The bytes of all tokens so far."""
        return self.size + self.tokenizer.decoded_bytes(self.rest)


def open_texts(
    files: str | None, shards: Path | None, scorer: Scorer
) -> dict[str, Sequence[Tokens]]:
    """Return the windows of text `files` and of a folder of shards, by name. Raises `UserError`."""
    texts: dict[str, Sequence[Tokens]] = {}
    if files:
        texts[files] = windows_of_files(files, scorer)
    if shards:
        texts[str(shards)] = ShardWindows(shards, scorer)
    return texts


def windows_of_files(pattern: str, scorer: Scorer) -> list[Tokens]:
    """Return the windows of the text files that a path, a folder or a glob names.

    A line `<|endoftext|>` ends a document. Raises `UserError`.
    """
    windows: list[Tokens] = []
    lost = 0  # bytes of the documents before, of which the tokenizer leaves nothing
    for file in matching_files(pattern, "text", "--text", scorer.layout.say):
        try:
            for _, content in documents_in(read_bytes(file), LARGEST):
                text = decode(content) if isinstance(content, bytes) else ""
                found = scorer.windows(text) if text.strip() else []
                lost += 0 if found else len(text.encode())
                if found:
                    found[0] = replace(found[0], size=(found[0].size or 0) + lost)
                    lost = 0
                windows += found
        except (OSError, Damage) as error:
            raise UserError(f"--text: cannot read {file}: {error}") from None
    if not windows:
        raise UserError(f"--text: {pattern} has no text")
    windows[-1] = replace(windows[-1], size=(windows[-1].size or 0) + lost)
    return windows


def measure_text(
    scorer: Scorer, name: str, windows: Sequence[Tokens], count: int, report: Report
) -> TextResult:
    """Return how well a model predicts the first `count` of the windows of a text.

    `report` is told how many windows were scored.
    """
    tokens = size = 0
    nats = 0.0
    decoded = DecodedBytes(scorer.tokenizer)
    for begin in range(0, count, CHUNK):
        chunk = [windows[number] for number in range(begin, min(begin + CHUNK, count))]
        tokens += sum(window.count for window in chunk)
        size += sum(window.size or 0 for window in chunk)
        unknown = [window for window in chunk if window.size is None]
        decoded.add([token for window in unknown for token in window.ids[-window.count :]])
        nats -= sum(score.log_likelihood for score in scorer.score_tokens(chunk, report))
    if isinstance(windows, ShardWindows):
        size = windows.own_bytes(tokens, decoded.total)
        return TextResult(name, tokens, size, nats, decoded=not windows.text_bytes)
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
    notes = [
        f"bytes of {each.text} are counted from its decoded tokens: it has no text"
        for each in results
        if each.decoded
    ]
    return [*table([heads, *rows]), *notes]
