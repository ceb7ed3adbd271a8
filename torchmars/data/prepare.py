"""From a corpus to a folder of shards, which a kill at any moment leaves whole or unfinished.

One process makes it, or tasks side by side. Each piece of the corpus has shards of its own, and
`part-N.json` once they are all on the disk. A piece without it is made again. When all have theirs,
the manifest is written, and what only the making needed goes.
"""

import contextlib
import hashlib
import json
import multiprocessing
import os
import signal
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

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
from torchmars.data import corpus, foreign
from torchmars.data.documents import Block, Damaged, Encoder, Part
from torchmars.data.manifest import (
    SPLITS,
    DataManifest,
    Shard,
    TokenDtype,
    check_manifest,
    cut_end,
    first_difference,
    has_manifest,
    numpy_dtype,
    read_manifest,
    read_split,
    shard_settings,
    write_manifest,
)
from torchmars.data.progress_bar import progress_bar
from torchmars.data.tokenizer import load_tokenizer, smallest_dtype
from torchmars.storage.objects import size_and_time

PLAN, DAMAGED = "plan.json", "damaged.jsonl"
NEEDED = "part-*.json*", "part-*.lock", f"{PLAN}*"  # by the making alone; the plan goes last
LOCK_SECONDS = 7 * 86400.0  # how long one process may prepare while others wait
AHEAD = 2  # blocks that are read ahead for each process that tokenises
# More damage ends the preparation: records that are left out, and files that cannot be read to
# their end, as a share of the corpus's bytes.
DAMAGED_RECORDS, LOST_SHARE = 100, 0.01
Encoded = tuple[dict[str, np.ndarray], Part]
Submit = Callable[[Block], "Future[Encoded]"]
# A block with its writer, and the bytes of all pieces up to it.
Submitted = tuple["PieceWriter", "Future[Encoded] | None", int]
T = TypeVar("T")


def prepare_shards(config: ResolvedData, task: int = 0, tasks: int = 1) -> DataManifest | None:
    """Make the shards of pieces `task`, `task + tasks`, ... of the corpus, if there are none.

    Whoever finds that all pieces are done makes the folder complete. Returns its manifest, or None
    if other tasks are not done yet; the bytes of shards are left to `check_shards`. Raises
    `UserError`, also if they were made from something else than `config` asks for.
    """
    folder = Path(config.path)
    remedy = "set data.path to a folder you can write"
    with file_errors(f"cannot write the shards to {folder}", remedy):
        if not has_manifest(folder) and parse_source(config.source).of_tokens:
            with turn(folder) as unfinished:
                if unfinished:
                    check_unused(folder)
                    foreign.index(config, folder)
        elif not has_manifest(folder):
            Preparation(config).make(task, tasks)
        if not has_manifest(folder):
            return None
        found = read_manifest(folder)
        check_manifest(found, config, folder)  # else its files may be somebody's
        clear(folder, *NEEDED)
        if lock_of(folder).exists():  # left by a process that ended between two calls
            lock_of(folder).unlink(missing_ok=True)
    return found


class Preparation:
    """A corpus on its way to a folder of shards."""

    def __init__(self, config: ResolvedData) -> None:
        """Find the files of the corpus and its pieces. Raises `UserError`."""
        self.config, self.folder = config, Path(config.path)
        self.source = parse_source(config.source)
        self.tokenizer = load_tokenizer(config.tokenizer, config.begin_token)
        self.dtype = smallest_dtype(self.tokenizer.vocab_size)
        self.made_from = shard_settings(config, self.tokenizer)
        self.files: dict[str, int] = {}  # the bytes of each
        for file in corpus.source_files(config):
            with file_errors(f"cannot read {file} of the corpus"):
                size, changed = size_and_time(file)
            self.files[str(file)] = size
            self.made_from[str(file)] = f"{size:,} bytes, written at {changed / 1e9}"
        self.pieces = corpus.corpus_pieces(self.source, self.files)

    def make(self, task: int, tasks: int) -> None:
        """Make a task's pieces, and the folder complete if all are done. Raises `UserError`."""
        with turn(self.folder) as unfinished:
            if not unfinished:
                return
            self.begin_folder()
            done = self.parts()
        self.make_pieces([n for n in range(task, len(self.pieces), tasks) if n not in done], done)
        with turn(self.folder) as unfinished:
            if unfinished and len(done := self.parts()) == len(self.pieces):
                self.finish_folder(done)

    def begin_folder(self) -> None:
        """Begin the folder, if it was not yet.

        Raises `UserError` if it was begun from something else, or has other files.
        """
        plan = self.folder / PLAN
        if plan.exists():
            if differs := first_difference(parse_json(read_text(plan)), self.made_from):
                raise UserError(
                    f"{self.folder} was begun with {differs}: set it back, or remove the folder to "
                    "start over"
                )
            return
        check_unused(self.folder)
        self.tokenizer.encode("a")  # its files are there
        os.makedirs(os.path.realpath(self.folder), exist_ok=True)  # a link may lead to none yet
        write_durably(plan, json.dumps(self.made_from))

    def parts(self) -> dict[int, Part]:
        """Return what has been made of the pieces that are done, by their numbers, in order."""
        files = {int(file.stem[5:]): file for file in self.folder.glob("part-*.json")}
        return {n: make(Part, parse_json(read_text(files[n]))) for n in sorted(files)}

    def make_pieces(self, mine: list[int], done: dict[int, Part]) -> None:
        """Make pieces, where some are done. Raises `UserError`, also for too much damage."""
        config, source = self.config, self.source
        damaged = [each for part in done.values() for each in part.damaged]
        encoder = Encoder(config, source, corpus.LONGEST)
        total = sum(each.size for number in mine for each in self.pieces[number])
        processes = config.processes or own_cores()
        if source.kind != "hf":  # no more than there are blocks
            processes = max(1, min(processes, -(-total // corpus.BLOCK)))
        what = f"tokenising {config.source} ({config.tokenizer})"
        unit = " shards" if source.kind == "hf" else "B"
        with progress_bar(what, total, unit) as bar, start_pool(encoder, processes) as submit:
            for writer, future, read in read_ahead(self.blocks(mine, submit), AHEAD * processes):
                bar.update(read - bar.n)
                if future is None:
                    writer.close()
                    continue
                tokens, part = future.result()
                writer.add(tokens, part)
                damaged += part.damaged
                self.check_damage(damaged)

    def blocks(self, numbers: Iterable[int], submit: Submit) -> Iterator[Submitted]:
        """Yield the blocks of pieces as they are submitted; without one, the end of each piece."""
        before = 0
        for number in numbers:
            piece = self.pieces[number]
            writer = PieceWriter(self.folder, number, self.dtype)
            if not writer.done:
                for block, read in corpus.read_piece(piece, self.source):
                    yield writer, submit(block), before + read
            before += sum(each.size for each in piece)
            yield writer, None, before

    def check_damage(self, damaged: list[Damaged]) -> str:
        """Return the damage of the corpus in words: "" if there is none.

        That is how many records and files, and where the first is. Raises `UserError` for too much.
        Then nothing is kept: what is repaired has another size or time.
        """
        records, rests = ([each for each in damaged if each.rest == rest] for rest in (False, True))
        lost = sum(self.files.get(name, 0) for name in {each.file for each in rests})
        share = lost / max(1, sum(self.files.values()))
        whole = f" that cannot be read to the end, {share:.2%} of it all"
        words = " and ".join(
            f"{counted(len(found), what)}{more} (the first: {found[0].file}, {found[0].place}: "
            f"{found[0].reason})"
            for found, what, more in ((records, "damaged record", ""), (rests, "file", whole))
            if found
        )
        if len(records) > DAMAGED_RECORDS or share > LOST_SHARE:
            take_back(self.folder)
            raise UserError(
                f"the corpus has {words}; at most {DAMAGED_RECORDS} records, and files of "
                f"{LOST_SHARE:.0%} of it, are left out: repair it, or name other files"
            )
        return words

    def finish_folder(self, parts: dict[int, Part]) -> None:
        """Complete the folder, whose pieces are all done. It can be called again after a kill.

        Raises `UserError` for a corpus without text, and for too much damage.
        """
        config, folder = self.config, self.folder
        whole = Part()
        for part in parts.values():
            whole.add(part)
        words, splits = self.check_damage(whole.damaged), whole.splits
        tokens = sum(split.tokens for split in splits.values())
        if tokens <= len(self.tokenizer.before) + 1:  # no more than begins and ends a document
            take_back(folder)
            found = words or f"{[*self.files, config.source][0]} is blank"
            raise UserError(f"the corpus has no text, and {found}: check data.source")
        if not all(split.tokens for split in splits.values()):
            say(
                "too few documents to split by document: the last "
                f"{100 * config.validation_fraction:g}% of the tokens is the validation split"
            )
            shards = [shard for split in splits.values() for shard in split.shards]
            both = cut_end(shards, config.validation_fraction, self.dtype)
            size = sum(split.text_bytes for split in splits.values())
            train, validation = (read_split(s, self.dtype, folder, self.tokenizer) for s in both)
            train.text_bytes = size * train.tokens // tokens
            validation.text_bytes = size - train.text_bytes
            splits = dict(zip(SPLITS, (train, validation)))
        if words:
            lines = "".join(json.dumps(asdict(each)) + "\n" for each in whole.damaged)
            write_durably(folder / DAMAGED, lines)
            say(f"left out {words}; all are in {DAMAGED} of {config.path}")
        write_manifest(folder, config, self.tokenizer, self.dtype, splits, self.files)


def lock_of(folder: Path) -> Path:
    """Return the file that whoever makes a folder locks."""
    return Path(os.path.realpath(folder) + ".lock")  # also where it is "."


@contextlib.contextmanager
def turn(folder: Path) -> Iterator[bool]:
    """Hold the lock of a folder in the body, as soon as no other process holds it.

    Yields whether the folder is still unfinished then.
    """
    file = lock_of(folder)
    with locked(file, f"preparing {folder}", LOCK_SECONDS):
        try:
            yield not has_manifest(folder)
        finally:
            file.unlink(missing_ok=True)


def check_unused(folder: Path) -> None:
    """Raise `UserError` if a folder has files, but for one that a kill left half written."""
    for file in folder.glob("*"):
        if not file.name.endswith(PARTIAL):
            raise UserError(
                f"{folder} holds {file.name}, but no manifest.json or {PLAN}: move it away, or set "
                "data.path to another folder"
            )


def clear(folder: Path, *patterns: str) -> None:
    """Delete the files of a folder that match patterns, in their order. Raises `OSError`."""
    for pattern in patterns:
        for file in folder.glob(pattern):
            file.unlink(missing_ok=True)


def take_back(folder: Path) -> None:
    """Delete all that was made of a corpus that will be another one. Raises `OSError`."""
    clear(folder, *NEEDED[:-1], *(f"{name}-*.bin" for name in SPLITS), NEEDED[-1])
    with contextlib.suppress(OSError):  # files of others are in it
        folder.rmdir()


def read_ahead(items: Iterable[T], count: int) -> Iterator[T]:
    """Yield items in their order; `count` more than that are taken, where there are so many."""
    pending: deque[T] = deque()
    for item in items:
        pending.append(item)
        if len(pending) > count:
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


class PieceWriter:
    """Writes the shards of a piece, one of each split, once no other process does."""

    def __init__(self, folder: Path, number: int, dtype: TokenDtype) -> None:
        """Raises `UserError` if another process does not let go of the piece."""
        self.folder, self.number, self.dtype = folder, number, numpy_dtype(dtype)
        self.file = folder / f"part-{number:05d}.json"  # is there once it is done
        doing = f"writing piece {number} of {folder}"
        self.lock = lock(self.file.with_suffix(".lock"), doing, LOCK_SECONDS)
        self.done = self.file.exists() or has_manifest(folder)
        self.part = Part()
        self.shards: dict[str, tuple[DurableFile, hashlib._Hash]] = {}

    def add(self, tokens: dict[str, np.ndarray], part: Part) -> None:
        """Append the tokens of a block. Raises `OSError`."""
        self.part.add(part)
        for name, some in tokens.items():
            if len(some):
                if name not in self.shards:
                    file = DurableFile(self.folder / f"{name}-{self.number:05d}.bin")
                    self.shards[name] = file, hashlib.sha256()
                file, digest = self.shards[name]
                data = some.astype(self.dtype, copy=False).tobytes()
                file.write(data)
                digest.update(data)

    def close(self) -> None:
        """Make the piece durable and done, and let go of it. Raises `OSError`."""
        if not self.done:
            for name, (file, digest) in self.shards.items():
                file.close()
                split = self.part.splits[name]
                split.shards = [Shard(Path(file.name).name, split.tokens, digest.hexdigest())]
            sync_folder(self.folder)
            write_durably(self.file, json.dumps(asdict(self.part)))
        if self.lock is not None:
            os.close(self.lock)
