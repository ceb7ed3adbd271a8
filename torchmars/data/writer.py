"""Writes the tokens of a piece of the corpus, so that a kill at any moment loses and doubles none.

A piece has shards of its own for each split, and a file with how far its input has come and how
long its files were then. A later start cuts the files to these lengths.
"""

import json
import os
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from torchmars.core.errors import UserError
from torchmars.core.files import open_to_write, read_text, sha256, sync_folder, write_durably
from torchmars.core.locks import lock
from torchmars.core.typed import make, parse_json
from torchmars.data.documents import Encoded, Position, TextBlock
from torchmars.data.manifest import SPLITS, Shard, Split, TokenDtype, numpy_dtype

LOCK_SECONDS = 7 * 86400.0  # how long one process may prepare while others wait
SAVE_SECONDS = 1.0  # at most so often a piece is made durable


@dataclass
class PieceProgress:
    """How far a piece has come: the contents of its files, and where its input continues."""

    position: Position = (0, 0, 0)
    read: int = 0
    """Bytes of the input up to there."""
    damaged: int = 0
    """Damaged records."""
    damaged_bytes: int = 0
    """Length of the file that lists them."""
    splits: dict[str, Split] = field(default_factory=lambda: {name: Split() for name in SPLITS})
    """The shards are listed when the piece is done."""
    done: bool = False
    text_bytes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SPLITS, 0))
    """Of the documents of each split, in UTF-8."""


def progress_file(folder: Path, number: int) -> Path:
    """Return where the progress of a piece is kept."""
    return folder / f"piece-{number:05d}.json"


def read_progress(folder: Path, number: int) -> PieceProgress:
    """Return the progress of a piece; none yet for one not begun. Raises `UserError`."""
    file = progress_file(folder, number)
    try:
        return make(PieceProgress, parse_json(read_text(file)))
    except FileNotFoundError:
        return PieceProgress()
    except (OSError, ValueError, UserError) as error:
        raise UserError(
            f"{file} cannot be read ({error}): remove the folder {folder} to start over"
        ) from None


class PieceWriter:
    """Writes the shards of one piece, from where its progress says on."""

    def __init__(self, folder: Path, number: int, dtype: TokenDtype, shard_tokens: int) -> None:
        """Begin a piece, or resume it, once no other process writes it. Raises `UserError`."""
        self.folder, self.number, self.shard_tokens = folder, number, shard_tokens
        self.dtype = numpy_dtype(dtype)
        self.damaged = folder / f"damaged-{number:05d}.jsonl"
        file = folder / f"piece-{number:05d}.lock"
        self.lock = lock(file, f"writing piece {number} of {folder}", LOCK_SECONDS)
        self.progress = read_progress(folder, number)
        self.saved = time.monotonic()
        self.unsaved: set[Path] = set()
        """Files with bytes that are not durable yet."""
        if not self.progress.done:
            self.cut_files()

    def cut_files(self) -> None:
        """Cut the files to the lengths of its progress. Raises `UserError` if they have less."""
        lengths = {
            self.folder / self.shard_name(name, index): count * self.dtype.itemsize
            for name, split in self.progress.splits.items()
            for index, count in enumerate(self.shard_lengths(split.tokens))
        }
        if self.progress.damaged_bytes:
            lengths[self.damaged] = self.progress.damaged_bytes
        for pattern in (self.damaged.name, *(f"{name}-{self.number:05d}-*.bin" for name in SPLITS)):
            for file in set(self.folder.glob(pattern)) - set(lengths):
                file.unlink()
        for file, length in lengths.items():
            if not file.exists() or file.stat().st_size < length:
                raise UserError(
                    f"{file} is shorter than its piece's progress says: remove the folder "
                    f"{self.folder} to start over"
                )
            with open(file, "ab", opener=open_to_write) as stream:
                os.truncate(stream.fileno(), length)

    def shard_name(self, split: str, index: int) -> str:
        """Return the name of a shard of this piece."""
        return f"{split}-{self.number:05d}-{index:03d}.bin"

    def shard_lengths(self, tokens: int) -> list[int]:
        """Return the tokens of each shard of a split of `tokens` tokens."""
        full, rest = divmod(tokens, self.shard_tokens)
        return [self.shard_tokens] * full + [rest] * (rest > 0)

    def add(self, block: TextBlock, encoded: Encoded) -> None:
        """Append the tokens of a block. Makes them durable if the last time was a while ago."""
        progress = self.progress
        for name, tokens in encoded.tokens.items():
            split = progress.splits[name]
            self.append_tokens(name, split.tokens, tokens)
            split.tokens += len(tokens)
            split.documents += encoded.documents[name]
            split.max_token = max(split.max_token, int(tokens.max(initial=0)))
            progress.text_bytes[name] += encoded.text[name]
        if encoded.damaged:
            lines = "".join(json.dumps(each) + "\n" for each in encoded.damaged).encode()
            self.append(self.damaged, lines)
            progress.damaged += len(encoded.damaged)
            progress.damaged_bytes += len(lines)
        progress.position, progress.read = block.end, block.read
        if time.monotonic() - self.saved >= SAVE_SECONDS:
            self.save()

    def append_tokens(self, split: str, before: int, tokens: np.ndarray) -> None:
        """Append tokens to a split that has `before` tokens, shard by shard."""
        while len(tokens):
            index, used = divmod(before, self.shard_tokens)
            some = tokens[: self.shard_tokens - used]
            data = some.astype(self.dtype, copy=False).tobytes()
            self.append(self.folder / self.shard_name(split, index), data)
            before, tokens = before + len(some), tokens[len(some) :]

    def append(self, file: Path, data: bytes) -> None:
        """Append to a file; `save` makes it durable."""
        with open(file, "ab", opener=open_to_write) as stream:
            stream.write(data)
        self.unsaved.add(file)

    def save(self) -> None:
        """Make the piece durable as it is: first its files, then their lengths."""
        for file in sorted(self.unsaved):
            sync_file(file)
        if self.unsaved:
            sync_folder(self.folder)
        self.unsaved.clear()
        write_durably(progress_file(self.folder, self.number), json.dumps(asdict(self.progress)))
        self.saved = time.monotonic()

    def close(self, size: int) -> None:
        """Make the piece, of `size` bytes of input, durable and done, and let go of it."""
        if not self.progress.done:
            for name, split in self.progress.splits.items():
                for index, count in enumerate(self.shard_lengths(split.tokens)):
                    file = self.shard_name(name, index)
                    split.shards.append(Shard(file, count, sha256(self.folder / file)))
            self.progress.read, self.progress.done = size, True
            self.save()
        if self.lock is not None:
            os.close(self.lock)


def sync_file(file: Path) -> None:
    """Make the bytes of a file durable."""
    with file.open("rb") as stream:
        os.fsync(stream.fileno())
