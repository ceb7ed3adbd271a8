"""From tokens to a folder of shards that a kill at any moment leaves whole or unfinished.

Each piece of the corpus has shards of its own, and `part-N.json` once they are all on the disk. A
piece without it is made again. When all have theirs, the manifest is written, what only the making
needed goes, and the folder gets its name.
"""

import contextlib
import hashlib
import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from torchmars.config import ResolvedData
from torchmars.core.check import make, parse_json
from torchmars.core.console import say
from torchmars.core.errors import UserError
from torchmars.core.files import DurableFile, lock, read_text, remove, sync_folder, write_durably
from torchmars.core.words import counted
from torchmars.data.documents import Damaged, Encoded
from torchmars.data.manifest import (
    SPLITS,
    Shard,
    Split,
    TokenDtype,
    cut_end,
    make_manifest,
    numpy_dtype,
    read_split,
    write_manifest,
)
from torchmars.data.tokenizer import load_tokenizer, smallest_dtype

LOCK_SECONDS = 7 * 86400.0  # how long one process may prepare while others wait
DAMAGED = "damaged.jsonl"
NEEDED = ("plan.json*", "part-*")  # by the making of a folder alone
# More damage ends the preparation: records that are left out, and files that cannot be read to
# their end, as a share of the corpus's bytes.
DAMAGED_RECORDS, LOST_SHARE = 100, 0.01


@dataclass
class Part:
    """What has been made of a piece."""

    splits: dict[str, Split] = field(default_factory=lambda: {name: Split() for name in SPLITS})
    damaged: list[Damaged] = field(default_factory=list)


def finished_part(folder: Path, number: int) -> Part | None:
    """Return what has been made of a piece; None if it is not done."""
    file = folder / f"part-{number:05d}.json"
    return make(Part, parse_json(read_text(file))) if file.exists() else None


class PieceWriter:
    """Writes the shards of a piece, once no other process does."""

    def __init__(self, folder: Path, number: int, dtype: TokenDtype, shard_tokens: int) -> None:
        """Raises `UserError` if another process does not let go of the piece."""
        self.folder, self.number, self.shard_tokens = folder, number, shard_tokens
        self.dtype, self.file = numpy_dtype(dtype), folder / f"part-{number:05d}.json"
        doing = f"writing piece {number} of {folder}"
        self.lock = lock(self.file.with_suffix(".lock"), doing, LOCK_SECONDS)
        self.done = self.file.exists()
        self.part = Part()
        self.files: dict[str, DurableFile] = {}
        self.hashes = {name: hashlib.sha256() for name in SPLITS}

    def add(self, encoded: Encoded) -> None:
        """Append the tokens of a block. Raises `OSError`."""
        for name, tokens in encoded.tokens.items():
            split = self.part.splits[name]
            split.tokens += len(tokens)
            split.documents += encoded.documents[name]
            split.max_token = max(split.max_token, int(tokens.max(initial=0)))
            split.text_bytes += encoded.text[name]
            while len(tokens):
                tokens = self.append(name, tokens)
        self.part.damaged += encoded.damaged

    def append(self, name: str, tokens: np.ndarray) -> np.ndarray:
        """Append tokens to the last shard of a split. Return those for which it has no room."""
        shards = self.part.splits[name].shards
        if name not in self.files:
            file = f"{name}-{self.number:05d}-{len(shards):03d}.bin"
            self.files[name] = DurableFile(self.folder / file)
            self.hashes[name] = hashlib.sha256()
            shards.append(Shard(file, 0))
        some = tokens[: self.shard_tokens - shards[-1].tokens]
        data = some.astype(self.dtype, copy=False).tobytes()
        self.files[name].write(data)
        self.hashes[name].update(data)
        shards[-1].tokens += len(some)
        if shards[-1].tokens == self.shard_tokens:
            self.end_shard(name)
        return tokens[len(some) :]

    def end_shard(self, name: str) -> None:
        """Make the last shard of a split durable."""
        self.files.pop(name).close()
        self.part.splits[name].shards[-1].sha256 = self.hashes[name].hexdigest()

    def close(self) -> None:
        """Make the piece durable and done, and let go of it. Raises `OSError`."""
        if not self.done:
            for name in list(self.files):
                self.end_shard(name)
            sync_folder(self.folder)
            write_durably(self.file, json.dumps(asdict(self.part)))
        if self.lock is not None:
            os.close(self.lock)


def check_damage(damaged: list[Damaged], files: dict[str, int], partial: Path) -> None:
    """Raise `UserError` for more damage than a corpus of such files may have.

    Then nothing is kept: what is repaired has another size or time.
    """
    records = sum(not each.rest for each in damaged)
    if records > DAMAGED_RECORDS or lost_share(damaged, files) > LOST_SHARE:
        remove(partial)
        raise UserError(
            f"the corpus has {damage_in_words(damaged, files)}; at most {DAMAGED_RECORDS} records, "
            f"and files of {LOST_SHARE:.0%} of it, are left out: repair it, or name other files"
        )


def lost_share(damaged: list[Damaged], files: dict[str, int]) -> float:
    """Return the share of a corpus's bytes in the files that cannot be read to their end."""
    lost = {each.file for each in damaged if each.rest}
    return sum(files.get(name, 0) for name in lost) / max(1, sum(files.values()))


def damage_in_words(damaged: list[Damaged], files: dict[str, int]) -> str:
    """Return how much damage a corpus has, and where the first is of records and of files."""
    share = f" that cannot be read to the end, {lost_share(damaged, files):.2%} of it all"
    return " and ".join(
        f"{counted(len(found), what)}{more} (the first: {found[0].file}, {found[0].place}: "
        f"{found[0].reason})"
        for rest, what, more in ((False, "damaged record", ""), (True, "file", share))
        if (found := [each for each in damaged if each.rest == rest])
    )


def finish_folder(
    config: ResolvedData, parts: list[Part], files: dict[str, int], partial: Path
) -> None:
    """Complete a folder whose pieces are all done, of files with so many bytes.

    Raises `UserError` for a corpus without text, and for too much damage. It can be called again
    after a kill.
    """
    damaged = [each for part in parts for each in part.damaged]
    check_damage(damaged, files, partial)
    splits = {name: Split() for name in SPLITS}
    for part in parts:
        for name, split in part.splits.items():
            splits[name].add(split)
    tokenizer = load_tokenizer(config.tokenizer, config.begin_token)
    dtype, around = smallest_dtype(tokenizer.vocab_size), len(tokenizer.before) + 1
    tokens = sum(split.tokens for split in splits.values())
    if tokens <= around:  # no more than begins and ends a document
        remove(partial)
        found = damage_in_words(damaged, files) or f"{[*files, config.source][0]} is blank"
        raise UserError(f"the corpus has no text, and {found}: check data.source")
    if not all(split.tokens for split in splits.values()):
        say(
            f"too few documents to split by document: the last {100 * config.validation_fraction:g}"
            "% of the tokens is the validation split"
        )
        whole = [shard for split in splits.values() for shard in split.shards]
        both = cut_end(whole, config.validation_fraction, dtype)
        size = sum(split.text_bytes for split in splits.values())
        splits = {n: read_split(s, dtype, partial, tokenizer) for n, s in zip(SPLITS, both)}
        train, validation = splits.values()
        train.text_bytes = size * train.tokens // tokens
        validation.text_bytes = size - train.text_bytes
    if damaged:
        lines = "".join(json.dumps(asdict(each)) + "\n" for each in damaged)
        write_durably(partial / DAMAGED, lines)
        say(f"left out {damage_in_words(damaged, files)}; all are in {DAMAGED} of {config.path}")
    manifest = make_manifest(config, tokenizer, dtype, splits)
    manifest.corpus = [*files]
    write_manifest(partial, manifest)


def rename_folder(partial: Path, folder: Path) -> None:
    """Give a folder with a manifest its final name, without files that only its making needed."""
    for pattern in NEEDED:
        for file in partial.glob(pattern):
            file.unlink()
    with contextlib.suppress(FileNotFoundError):
        folder.rmdir()  # it is empty
    sync_folder(partial)
    partial.rename(folder)
    sync_folder(folder.parent)
