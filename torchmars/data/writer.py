"""From tokens to a folder of shards that a kill at any moment leaves whole or unfinished.

Each piece of the corpus has shards of its own, and `part-N.json` once they are all on the disk. A
piece without it is made again. When all have theirs, the manifest is written, what only the making
needed goes, and the folder gets its name.
"""

import contextlib
import hashlib
import json
import os
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from torchmars.config import ResolvedData
from torchmars.core.console import say
from torchmars.core.errors import UserError
from torchmars.core.files import DurableFile, read_text, remove, sync_folder, write_durably
from torchmars.core.locks import lock
from torchmars.core.typed import make, parse_json
from torchmars.core.words import counted
from torchmars.data.documents import Damaged, Encoded
from torchmars.data.manifest import (
    SPLITS,
    DataManifest,
    Shard,
    Split,
    TokenDtype,
    make_manifest,
    numpy_dtype,
    write_manifest,
)
from torchmars.data.tokenizer import Tokenizer, load_tokenizer, smallest_dtype

LOCK_SECONDS = 7 * 86400.0  # how long one process may prepare while others wait
DAMAGED = "damaged.jsonl"
MADE = re.compile(r"(plan|array)\.json|part-|(train|validation)-|damaged\.jsonl|manifest\.json")
# More damage ends the preparation: records that are left out, and files that cannot be read to
# their end, as a share of the corpus's bytes.
DAMAGED_RECORDS, LOST_SHARE = 100, 0.01


@dataclass
class Part:
    """What has been made of a piece."""

    splits: dict[str, Split] = field(default_factory=lambda: {name: Split() for name in SPLITS})
    text_bytes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SPLITS, 0))
    """Of the documents of each split, in UTF-8."""
    damaged: list[Damaged] = field(default_factory=list)


def part_file(folder: Path, number: int) -> Path:
    """Return the file that says that a piece is done."""
    return folder / f"part-{number:05d}.json"


def finished_part(folder: Path, number: int) -> Part | None:
    """Return what has been made of a piece; None if it is not done. Raises `UserError`."""
    file = part_file(folder, number)
    try:
        return make(Part, parse_json(read_text(file)))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, UserError) as error:
        raise UserError(f"{file} cannot be read ({error}): remove it to make it again") from None


class PieceWriter:
    """Writes the shards of a piece, once no other process does."""

    def __init__(self, folder: Path, number: int, dtype: TokenDtype, shard_tokens: int) -> None:
        """Raises `UserError` if another process does not let go of the piece."""
        self.folder, self.number, self.shard_tokens = folder, number, shard_tokens
        self.dtype = numpy_dtype(dtype)
        file = folder / f"part-{number:05d}.lock"
        self.lock = lock(file, f"writing piece {number} of {folder}", LOCK_SECONDS)
        self.done = part_file(folder, number).exists()
        self.part = Part()
        self.files: dict[str, DurableFile] = {}
        self.hashes = {name: hashlib.sha256() for name in SPLITS}
        if not self.done:
            for name in SPLITS:
                for left in folder.glob(f"{name}-{number:05d}-*.bin"):
                    left.unlink()

    def add(self, encoded: Encoded) -> None:
        """Append the tokens of a block. Raises `OSError`."""
        for name, tokens in encoded.tokens.items():
            split = self.part.splits[name]
            split.tokens += len(tokens)
            split.documents += encoded.documents[name]
            split.max_token = max(split.max_token, int(tokens.max(initial=0)))
            self.part.text_bytes[name] += encoded.text[name]
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
            shards.append(Shard(file, 0, ""))
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
            write_durably(part_file(self.folder, self.number), json.dumps(asdict(self.part)))
        if self.lock is not None:
            os.close(self.lock)


def check_damage(damaged: list[Damaged], files: dict[str, int]) -> None:
    """Raise `UserError` for more damage than a corpus of such files may have."""
    lost = {each.file for each in damaged if each.rest}
    too_much = lost_share(lost, files) > LOST_SHARE if any(files.values()) else bool(lost)
    if len(damaged) - len(lost) > DAMAGED_RECORDS or too_much:
        raise UserError(
            f"the corpus has {damage_in_words(damaged, files)}; at most {DAMAGED_RECORDS} records, "
            f"and files of {LOST_SHARE:.0%} of it, are left out: repair it, or name other files"
        )


def lost_share(lost: set[str], files: dict[str, int]) -> float:
    """Return the share of a corpus's bytes that `lost` files have."""
    return sum(files.get(name, 0) for name in lost) / max(1, sum(files.values()))


def damage_in_words(damaged: list[Damaged], files: dict[str, int]) -> str:
    """Return how much damage a corpus has, and where the first is of records and of files."""
    rests = [each for each in damaged if each.rest]
    share = lost_share({each.file for each in rests}, files)
    whole = f" that cannot be read to the end, {share:.2%} of it all"
    records = [each for each in damaged if not each.rest]
    return " and ".join(
        f"{counted(len(found), what)}{more} (the first: {found[0].file}, {found[0].place}: "
        f"{found[0].reason})"
        for found, what, more in ((records, "damaged record", ""), (rests, "file", whole))
        if found
    )


def finish_folder(
    config: ResolvedData, parts: list[Part], files: dict[str, int], partial: Path
) -> None:
    """Write the manifest of a folder whose pieces are all done, of files with so many bytes.

    Raises `UserError` for a corpus without text, and for one of more damage than is allowed. It can
    be called again after a kill.
    """
    damaged = [each for part in parts for each in part.damaged]
    check_damage(damaged, files)
    splits = {name: joined([part.splits[name] for part in parts]) for name in SPLITS}
    text_bytes = {name: sum(part.text_bytes[name] for part in parts) for name in SPLITS}
    tokenizer = load_tokenizer(config.tokenizer, config.begin_token)
    around = len(tokenizer.before) + 1  # tokens that begin and end a document
    if sum(split.tokens for split in splits.values()) <= around:
        remove(partial)
        why = f", but {damage_in_words(damaged, files)}" if damaged else ""
        names = [*files] or [config.source]
        more = f" and {counted(len(names) - 1, 'other')}" if names[1:] else ""
        raise UserError(f"the corpus has no text in {names[0]}{more}{why}: check data.source")
    if not all(split.tokens for split in splits.values()):
        whole = next(split for split in splits.values() if split.tokens)
        splits = cut_tail(whole, config.validation_fraction, partial, tokenizer)
        size = sum(text_bytes.values())
        kept = size * splits["train"].tokens // whole.tokens
        text_bytes = {"train": kept, "validation": size - kept}
    if damaged:
        lines = "".join(json.dumps(asdict(each)) + "\n" for each in damaged)
        write_durably(partial / DAMAGED, lines)
        say(f"left out {damage_in_words(damaged, files)}; all are in {DAMAGED} of {config.path}")
    dtype = smallest_dtype(tokenizer.vocab_size)
    manifest = make_manifest(config, tokenizer, splits, dtype, text_bytes, list(files))
    write_manifest(partial, manifest)


def joined(splits: list[Split]) -> Split:
    """Return the splits of consecutive pieces as one."""
    return Split(
        sum(split.tokens for split in splits),
        sum(split.documents for split in splits),
        max(split.max_token for split in splits),
        [shard for split in splits for shard in split.shards],
    )


def cut_tail(whole: Split, fraction: float, folder: Path, tokenizer: Tokenizer) -> dict[str, Split]:
    """Give the end of the only split that has tokens to validation, and the rest to training.

    The files that it reads stay as they are: a kill may come at any moment.
    """
    dtype = numpy_dtype(smallest_dtype(tokenizer.vocab_size))
    say(
        f"too few documents ({whole.documents:,}) to split by document: the last "
        f"{100 * fraction:.3g}% of the tokens is the validation split"
    )
    length = max(1, int(whole.tokens * fraction))
    left = whole.tokens - length
    parts: dict[str, list[Shard]] = {name: [] for name in SPLITS}
    ends, largest, last = 0, 0, tokenizer.end_of_text
    for shard in whole.shards:
        count = min(shard.tokens, left)
        left -= count
        tokens = np.fromfile(folder / shard.file, dtype)
        for name, some in (("train", tokens[:count]), ("validation", tokens[count:])):
            if not len(some):
                continue
            if shard.file.startswith(name) and len(some) == shard.tokens:
                parts[name].append(shard)
            else:
                file = f"{name}-tail-{len(parts[name]):03d}.bin"
                write_durably(folder / file, some.tobytes())
                digest = hashlib.sha256(some.tobytes()).hexdigest()
                parts[name].append(Shard(file, len(some), digest))
        if count:
            last = int(tokens[count - 1])
        ends += int((tokens[count:] == tokenizer.end_of_text).sum())
        largest = max(largest, int(tokens[count:].max(initial=0)))
    shared = int(last != tokenizer.end_of_text)  # a document that is cut has a part in both
    documents = whole.documents - ends + shared
    return {
        "train": Split(whole.tokens - length, documents, whole.max_token, parts["train"]),
        "validation": Split(length, ends, largest, parts["validation"]),
    }


def rename_folder(partial: Path, folder: Path, manifest: DataManifest) -> None:
    """Give a folder with a manifest its final name, without files that only its making needed."""
    kept = {shard.file for split in manifest.splits.values() for shard in split.shards}
    kept |= {DAMAGED, "manifest.json"}
    for file in partial.iterdir():
        if MADE.match(file.name) and file.name not in kept:
            file.unlink()
    with contextlib.suppress(FileNotFoundError):
        folder.rmdir()  # it is empty
    sync_folder(partial)
    partial.rename(folder)
    sync_folder(folder.parent)
