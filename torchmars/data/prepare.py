"""From a corpus to a folder of shards, which a kill at any moment leaves whole or unfinished.

One process makes it, or tasks side by side. Each piece of the corpus has shards of its own, and
`part-N.json` once they are all on the disk. A piece without it is made again. When all have theirs,
the manifest is written, what only the making needed goes, and the folder gets its name.
"""

import contextlib
import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from torchmars.cluster.process import send_once_gone
from torchmars.config import ResolvedData
from torchmars.config.source import parse_source
from torchmars.core.check import make, parse_json
from torchmars.core.console import say
from torchmars.core.errors import UserError, file_errors
from torchmars.core.files import (
    PARTIAL,
    DurableFile,
    lock,
    locked,
    own_cores,
    read_text,
    sync_folder,
    write_durably,
)
from torchmars.core.words import counted
from torchmars.data import foreign
from torchmars.data.corpus import Piece, Sizes, corpus_pieces, read_piece, source_files
from torchmars.data.documents import Damaged, Encoded, Encoder, TextPart
from torchmars.data.manifest import (
    SPLITS,
    DataManifest,
    Shard,
    Split,
    TokenDtype,
    check_manifest,
    cut_end,
    first_difference,
    has_manifest,
    make_manifest,
    numpy_dtype,
    read_manifest,
    read_split,
    shard_settings,
    write_manifest,
)
from torchmars.data.progress_bar import progress_bar
from torchmars.data.tokenizer import load_tokenizer, smallest_dtype
from torchmars.storage.objects import size_and_time

SIZES = Sizes()
PLAN, DAMAGED = "plan.json", "damaged.jsonl"
NEEDED = (f"{PLAN}*", "part-*")  # by the making of a folder alone
LOCK_SECONDS = 7 * 86400.0  # how long one process may prepare while others wait
AHEAD = 2  # blocks that are read ahead for each process that tokenises
# More damage ends the preparation: records that are left out, and files that cannot be read to
# their end, as a share of the corpus's bytes.
DAMAGED_RECORDS, LOST_SHARE = 100, 0.01
Block = list[TextPart]
Submit = Callable[[Block], "Future[Encoded]"]


def prepare_shards(config: ResolvedData) -> DataManifest:
    """Return the manifest of the shards in data.path, which are made first if there are none.

    Raises `UserError` if they were made from something else than `config` asks for. Their bytes
    are left to `check_shards`.
    """
    manifest = prepare_task(config, 0, 1)
    assert manifest is not None  # there are no other tasks
    return manifest


def prepare_task(
    config: ResolvedData, task: int, tasks: int, sizes: Sizes = SIZES
) -> DataManifest | None:
    """Make the shards of pieces `task`, `task + tasks`, ... of the corpus.

    Whoever finds that all pieces are done makes the folder complete. Returns its manifest, or None
    if other tasks are not done yet. Raises `UserError`.
    """
    folder = Path(config.path)
    if not has_manifest(folder):
        with file_errors(
            f"cannot write the shards to {folder}", "set data.path to a folder you can write"
        ):
            if parse_source(config.source).of_tokens:
                with turn(folder):
                    if not has_manifest(folder):
                        foreign.index(config, folder, sizes.shard_tokens)
            else:
                make_folder(config, folder, task, tasks, sizes)
    if not has_manifest(folder):
        return None
    lock_of(folder).unlink(missing_ok=True)  # left by a process that has ended between two calls
    found = read_manifest(folder)
    check_manifest(found, config, folder)
    return found


def make_folder(config: ResolvedData, folder: Path, task: int, tasks: int, sizes: Sizes) -> None:
    """Make a task's pieces, and the folder complete if all are done. Raises `UserError`."""
    real = Path(os.path.realpath(folder))  # also where it is "."
    partial = real.with_name(real.name + PARTIAL)
    files, made_from = corpus_files(config)
    pieces = corpus_pieces(parse_source(config.source), files, sizes)
    with turn(folder):
        if has_manifest(folder):
            return
        if not has_manifest(partial):  # else a process ended here
            begin_folder(config, folder, partial, made_from | asdict(sizes))
    make_pieces(config, pieces, files, partial, range(task, len(pieces), tasks), sizes)
    with turn(folder):
        if has_manifest(folder):
            return
        if not has_manifest(partial):
            parts = [finished_part(partial, number) for number in range(len(pieces))]
            done = [part for part in parts if part]
            if len(done) < len(parts):
                return
            finish_folder(config, done, files, partial)
        rename_folder(partial, real)


def lock_of(folder: Path) -> Path:
    """Return the file that whoever makes a folder locks."""
    real = Path(os.path.realpath(folder))
    return real.with_name(real.name + ".lock")


@contextlib.contextmanager
def turn(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder in the body, as soon as no other process holds it."""
    file = lock_of(folder)
    with locked(file, f"preparing {folder}", LOCK_SECONDS):
        try:
            yield
        finally:
            file.unlink(missing_ok=True)


def corpus_files(config: ResolvedData) -> tuple[dict[str, int], dict[str, Any]]:
    """Return the bytes of each file of the corpus, and what shards depend on, by name.

    Raises `UserError`.
    """
    tokenizer = load_tokenizer(config.tokenizer, config.begin_token)
    files, made_from = {}, shard_settings(config, tokenizer)
    for file in source_files(config):
        with file_errors(f"cannot read {file} of the corpus"):
            files[str(file)], changed = size_and_time(file)
        made_from[str(file)] = f"{files[str(file)]:,} bytes, written at {changed / 1e9}"
    return files, made_from


def begin_folder(
    config: ResolvedData, folder: Path, partial: Path, made_from: dict[str, Any]
) -> None:
    """Begin a folder in `partial`, if it was not yet.

    Raises `UserError` if it was begun from something else, or where there are other files.
    """
    plan = partial / PLAN
    if plan.exists():
        if differs := first_difference(parse_json(read_text(plan)), made_from):
            raise UserError(
                f"{folder} was begun with {differs}: set it back, or remove the folder {partial} "
                "to start over"
            )
        return
    for file in (*folder.glob("*"), *partial.glob("*")):
        if not file.name.startswith(PLAN):
            raise UserError(
                f"{file.parent} holds {file.name}, but no manifest.json or {PLAN}: move it away, "
                "or set data.path to another folder"
            )
    load_tokenizer(config.tokenizer).encode_batch(["a"])  # its files are there
    partial.mkdir(parents=True, exist_ok=True)
    write_durably(plan, json.dumps(made_from))


def make_pieces(
    config: ResolvedData,
    pieces: list[Piece],
    files: dict[str, int],
    partial: Path,
    mine: Iterable[int],
    sizes: Sizes,
) -> None:
    """Make those pieces that are not done. Raises `UserError`, also for too much damage."""
    parts = [finished_part(partial, number) for number in range(len(pieces))]
    damaged = [each for part in parts if part for each in part.damaged]
    mine = [number for number in mine if not parts[number]]
    source = parse_source(config.source)
    named = config.tokenizer, config.begin_token
    fraction = config.validation_fraction
    encoder = Encoder(source.kind, source.field, *named, fraction, sizes.document)
    dtype = smallest_dtype(load_tokenizer(config.tokenizer).vocab_size)
    total = sum(each.size for number in mine for each in pieces[number])
    processes = config.processes or own_cores()
    if source.kind != "hf":  # no more than there are blocks
        processes = max(1, min(processes, -(-total // sizes.block)))

    def blocks() -> Iterator[tuple[PieceWriter, Block | None]]:
        """Yield the blocks of pieces, each with its writer; None ends a piece."""
        for number in mine:
            if not (partial / PLAN).exists():  # another process has made the folder complete
                return
            writer = PieceWriter(partial, number, dtype, sizes.shard_tokens)
            if not (partial / PLAN).exists():  # while this one has waited
                return
            if not writer.done:
                for block in read_piece(pieces[number], source, sizes):
                    yield writer, block
            yield writer, None

    what = f"tokenising {config.source} ({config.tokenizer})"
    unit = " shards" if source.kind == "hf" else "B"
    with progress_bar(what, total, unit) as bar, start_pool(encoder, processes) as submit:
        for writer, block, future in in_order(blocks(), submit, AHEAD * processes):
            if block is None or future is None:
                writer.close()
                continue
            encoded = future.result()
            writer.add(encoded)
            bar.update(sum(part.read for part in block))
            damaged += encoded.damaged
            check_damage(damaged, files, partial)


Submitted = tuple["PieceWriter", Block | None, "Future[Encoded] | None"]


def in_order(
    blocks: Iterable[tuple["PieceWriter", Block | None]], submit: Submit, ahead: int
) -> Iterator[Submitted]:
    """Yield blocks in their order, submitted; at most `ahead` after each are under way."""
    pending: deque[Submitted] = deque()
    for writer, block in blocks:
        pending.append((writer, block, submit(block) if block else None))
        if len(pending) > ahead:
            yield pending.popleft()
    yield from pending


@contextlib.contextmanager
def start_pool(encoder: Encoder, count: int) -> Iterator[Submit]:
    """Let `count` processes tokenise what the body submits; one is a thread of this process.

    Raises `UserError` where one of them dies. They end with the body, and with this process. Their
    main module is not this one's, which may be a script of the user's and would start all over, and
    they import no modules of the current folder in place of Python's.
    """
    pool: Executor = ThreadPoolExecutor(1)
    if count > 1:
        context = multiprocessing.get_context("spawn")
        pool = ProcessPoolExecutor(count, context, begin_process, (os.getpid(),))

    def submit(block: Block) -> "Future[Encoded]":
        main, before = sys.modules["__main__"], os.environ.get("PYTHONSAFEPATH", "")
        sys.modules["__main__"] = types.ModuleType("__main__")
        os.environ["PYTHONSAFEPATH"] = "1"
        try:
            return pool.submit(encoder.encode, block)  # it may start processes
        finally:
            sys.modules["__main__"] = main
            os.environ["PYTHONSAFEPATH"] = before  # "" is as none

    try:
        yield submit
    except BrokenProcessPool:
        raise UserError(
            "a process that tokenises has died: start again to continue; with less memory, set "
            "data.processes lower"
        ) from None
    finally:
        # Blocks in work are done first: who killed a process that writes would wait for its rest.
        pool.shutdown(cancel_futures=True)


def begin_process(parent: int) -> None:
    """End this process with its parent, and leave Ctrl-C to that."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    send_once_gone(parent, signal.SIGKILL)


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
            counts = encoded.documents[name], encoded.text[name], int(tokens.max(initial=0))
            self.part.splits[name].add(Split(len(tokens), *counts))
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


def check_damage(damaged: list[Damaged], files: dict[str, int], partial: Path) -> str:
    """Return the damage of a corpus of files with so many bytes: "" if there is none.

    That is how many records and files, and where the first is. Raises `UserError` for too much.
    Then nothing is kept: what is repaired has another size or time.
    """
    records, rests = ([each for each in damaged if each.rest == rest] for rest in (False, True))
    lost = sum(files.get(name, 0) for name in {each.file for each in rests})
    share = lost / max(1, sum(files.values()))
    whole = f" that cannot be read to the end, {share:.2%} of it all"
    words = " and ".join(
        f"{counted(len(found), what)}{more} (the first: {found[0].file}, {found[0].place}: "
        f"{found[0].reason})"
        for found, what, more in ((records, "damaged record", ""), (rests, "file", whole))
        if found
    )
    if len(records) > DAMAGED_RECORDS or share > LOST_SHARE:
        shutil.rmtree(partial)
        raise UserError(
            f"the corpus has {words}; at most {DAMAGED_RECORDS} records, and files of "
            f"{LOST_SHARE:.0%} of it, are left out: repair it, or name other files"
        )
    return words


def finish_folder(
    config: ResolvedData, parts: list[Part], files: dict[str, int], partial: Path
) -> None:
    """Complete a folder whose pieces are all done, of files with so many bytes.

    Raises `UserError` for a corpus without text, and for too much damage. It can be called again
    after a kill.
    """
    damaged = [each for part in parts for each in part.damaged]
    words = check_damage(damaged, files, partial)
    splits = {name: Split() for name in SPLITS}
    for part in parts:
        for name, split in part.splits.items():
            splits[name].add(split)
    tokenizer = load_tokenizer(config.tokenizer, config.begin_token)
    dtype, around = smallest_dtype(tokenizer.vocab_size), len(tokenizer.before) + 1
    tokens = sum(split.tokens for split in splits.values())
    if tokens <= around:  # no more than begins and ends a document
        shutil.rmtree(partial)
        found = words or f"{[*files, config.source][0]} is blank"
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
        say(f"left out {words}; all are in {DAMAGED} of {config.path}")
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
