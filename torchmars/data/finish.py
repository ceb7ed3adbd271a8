"""From finished pieces to a folder of shards: its manifest, and its name."""

import contextlib
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from torchmars.config import ResolvedData
from torchmars.core.console import say
from torchmars.core.errors import UserError
from torchmars.core.files import remove, sha256, sync_folder, write_durably
from torchmars.data import sources
from torchmars.data.corpus_plan import CorpusPlan
from torchmars.data.manifest import SPLITS, Shard, Split, make_manifest, numpy_dtype, write_manifest
from torchmars.data.tokenizer import Tokenizer, load_tokenizer, smallest_dtype
from torchmars.data.writer import PieceProgress, read_progress, sync_file

DAMAGED = "damaged.jsonl"
TAIL = "validation-tail.bin"


def finish_folder(
    config: ResolvedData, plan: CorpusPlan, partial: Path, texts_of: Callable[[int], Iterable[str]]
) -> None:
    """Write the manifest of a folder whose pieces are all done.

    `texts_of` reads the documents of a piece once more, by its number. Raises `UserError` for a
    corpus without text, and for one of more damage than is allowed. It can be called again after a
    kill.
    """
    progress = [read_progress(partial, number) for number in range(len(plan.pieces))]
    splits = {name: joined_splits(each.splits[name] for each in progress) for name in SPLITS}
    text_bytes = {name: sum(each.text_bytes[name] for each in progress) for name in SPLITS}
    damaged = [
        line
        for file in sorted(partial.glob("damaged-*.jsonl"))
        for line in file.read_text().splitlines(keepends=True)
    ]
    tokenizer = load_tokenizer(config.tokenizer, config.begin_token)
    around = len(tokenizer.before) + 1  # tokens that begin and end a document
    if sum(split.tokens for split in splits.values()) <= around:
        remove(partial)
        why = f", but {damage_in_words(damaged)}" if damaged else ""
        raise UserError(f"the corpus has no text{why}: check data.source and data.files")
    check_damage(config, len(damaged), partial)
    dtype = smallest_dtype(tokenizer.vocab_size)
    if not all(split.tokens for split in splits.values()):
        cut_tail(splits, config.validation_fraction, partial, tokenizer)
        kept = bytes_of_first(splits["train"].tokens, progress, tokenizer, texts_of)
        text_bytes = {"train": kept, "validation": sum(text_bytes.values()) - kept}
    if damaged:
        write_durably(partial / DAMAGED, "".join(damaged))
        say(f"left out {damage_in_words(damaged)}; all are in {DAMAGED} of {config.path}")
    sources.write_sources(partial, plan)
    manifest = make_manifest(config, tokenizer, splits, dtype, text_bytes)
    write_manifest(partial, manifest)


def rename_folder(partial: Path, folder: Path) -> None:
    """Give a folder with a manifest its final name, without files that only its making needed."""
    for pattern in ("piece-*", "damaged-*", "plan.json*"):
        for file in partial.glob(pattern):
            file.unlink()
    if folder.exists():  # it is empty
        folder.rmdir()
    sync_folder(partial)
    partial.rename(folder)
    sync_folder(folder.parent)


def joined_splits(splits: Iterable[Split]) -> Split:
    """Return the splits of consecutive pieces as one."""
    whole = Split()
    for split in splits:
        whole.tokens += split.tokens
        whole.documents += split.documents
        whole.max_token = max(whole.max_token, split.max_token)
        whole.shards += split.shards
    return whole


def check_damage(config: ResolvedData, damaged: int, partial: Path) -> None:
    """Raise `UserError` for more damaged records than the config allows."""
    if damaged > config.max_damaged:
        raise UserError(
            f"the corpus has {damaged:,} damaged records so far, more than data.max_damaged = "
            f"{config.max_damaged:,}: see damaged-*.jsonl in {partial}; raise the limit to leave "
            "them out, or repair the corpus and remove that folder"
        )


def damage_in_words(damaged: list[str]) -> str:
    """Return how many damaged records there are, and where the first is."""
    first = json.loads(damaged[0])
    where = f"{first['file']}, {first['place']}: {first['reason']}"
    return f"{len(damaged):,} damaged records (the first: {where})"


def cut_tail(splits: dict[str, Split], fraction: float, folder: Path, tokenizer: Tokenizer) -> None:
    """Give the end of the only split that has tokens to validation, and the rest to training.

    Each step finds out whether it was done already, since a kill may come between any two.
    """
    whole = next(split for split in splits.values() if split.tokens)
    dtype = numpy_dtype(smallest_dtype(tokenizer.vocab_size))
    say(
        f"too few documents ({whole.documents:,}) to split by document: the last "
        f"{100 * fraction:.3g}% of the tokens is the validation split"
    )
    length = max(1, int(whole.tokens * fraction))
    kept, cut = [], []  # shards with the tokens that stay in each
    left = whole.tokens - length
    for shard in whole.shards:
        name = shard.file.replace("validation", "train")
        with contextlib.suppress(FileNotFoundError):
            (folder / shard.file).rename(folder / name)
        count = min(shard.tokens, left)
        left -= count
        if count:
            kept.append(Shard(name, count, shard.sha256))
        if count < shard.tokens:
            cut.append((folder / name, count))
    if not (folder / TAIL).exists():
        parts = [np.fromfile(file, dtype, offset=count * dtype.itemsize) for file, count in cut]
        write_durably(folder / TAIL, np.concatenate(parts).tobytes())
    for file, count in cut:
        if count:
            os.truncate(file, count * dtype.itemsize)
            sync_file(file)
            kept[-1].sha256 = sha256(file)
        else:
            file.unlink(missing_ok=True)
    tail = np.fromfile(folder / TAIL, dtype)
    ends = int((tail == tokenizer.end_of_text).sum())
    last = np.fromfile(folder / kept[-1].file, dtype)[-1]
    shared = int(last != tokenizer.end_of_text)  # a document that is cut has a part in both
    splits["train"] = Split(
        whole.tokens - length, whole.documents - ends + shared, whole.max_token, kept
    )
    splits["validation"] = Split(
        length, ends, int(tail.max()), [Shard(TAIL, length, sha256(folder / TAIL))]
    )


def bytes_of_first(
    count: int,
    progress: list[PieceProgress],
    tokenizer: Tokenizer,
    texts_of: Callable[[int], Iterable[str]],
) -> int:
    """Return the bytes of the text of the first `count` tokens of a corpus that is one split.

    The text is read again of the piece alone in which they end. `texts_of` is as in
    `finish_folder`.
    """
    size = 0
    for number, piece in enumerate(progress):
        tokens = sum(split.tokens for split in piece.splits.values())
        if tokens <= count:
            count -= tokens
            size += sum(piece.text_bytes.values())
            continue
        for text in texts_of(number):
            with contextlib.suppress(UserError):  # the tokenizer gave up on it then too
                found, ends = tokenizer.encode_measured(text)
                count = max(0, count - len(tokenizer.before))
                if count <= len(found):
                    return size + (int(ends[count - 1]) if count else 0)
                count -= len(found) + 1
                size += len(text.encode())
    return size
