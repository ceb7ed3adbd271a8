"""From a corpus to shards: tokenised once, by one process or by tasks side by side."""

import contextlib
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
from typing import Any

from torchmars.cluster import process
from torchmars.config import ResolvedData
from torchmars.config.source import parse_source
from torchmars.core.check import parse_json
from torchmars.core.errors import UserError, file_errors
from torchmars.core.files import PARTIAL, locked, own_cores, read_text, write_durably
from torchmars.data import foreign
from torchmars.data.corpus import Piece, Sizes, source_files
from torchmars.data.documents import Encoded, Encoder, TextPart
from torchmars.data.manifest import (
    DataManifest,
    check_manifest,
    first_difference,
    has_manifest,
    read_manifest,
    shard_settings,
)
from torchmars.data.progress_bar import progress_bar
from torchmars.data.reading import corpus_pieces, read_piece
from torchmars.data.tokenizer import load_tokenizer, smallest_dtype
from torchmars.data.writer import (
    LOCK_SECONDS,
    PieceWriter,
    check_damage,
    finish_folder,
    finished_part,
    rename_folder,
)
from torchmars.storage.objects import size_and_time

SIZES = Sizes()
PLAN = "plan.json"
AHEAD = 2  # blocks that are read ahead for each process that tokenises
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
    with contextlib.suppress(OSError):
        lock_of(folder).unlink()  # left by a process that has ended between two calls
    found = read_manifest(folder)
    check_manifest(found, config, folder)
    return found


def make_folder(config: ResolvedData, folder: Path, task: int, tasks: int, sizes: Sizes) -> None:
    """Make a task's pieces, and the folder complete if all are done. Raises `UserError`."""
    real = Path(os.path.realpath(folder))  # also where it is "."
    partial = real.with_name(real.name + PARTIAL)
    files, made_from = corpus_files(config, [lock_of(folder), partial, real])
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


def corpus_files(config: ResolvedData, own: list[Path]) -> tuple[dict[str, int], dict[str, Any]]:
    """Return the bytes of each file of the corpus, and what shards depend on, by name.

    A glob may match the places of its `own` shards. Raises `UserError`.
    """
    tokenizer = load_tokenizer(config.tokenizer, config.begin_token)
    files, made_from = {}, shard_settings(config, tokenizer)
    for file in source_files(config):
        if isinstance(file, Path) and any(map(Path(os.path.realpath(file)).is_relative_to, own)):
            continue
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
    for place in (folder, partial):
        others = sorted(place.iterdir()) if place.is_dir() else [place] if place.exists() else []
        if any(not file.name.startswith(PLAN) for file in others):
            raise UserError(
                f"{place} holds {others[0].name}, but no manifest.json or {PLAN}: move it away, or "
                "set data.path to another folder"
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


Submitted = tuple[PieceWriter, Block | None, "Future[Encoded] | None"]


def in_order(
    blocks: Iterable[tuple[PieceWriter, Block | None]], submit: Submit, ahead: int
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

    Raises `UserError` where one of them dies. They end with the body, and with this process.
    """
    pool: Executor = ThreadPoolExecutor(1)
    if count > 1:
        with as_here():
            context = multiprocessing.get_context("spawn")
            with_this = os.getpid(), signal.SIGKILL
            pool = ProcessPoolExecutor(count, context, process.send_once_gone, with_this)

    def submit(block: Block) -> "Future[Encoded]":
        with as_here():  # it may start a process
            return pool.submit(encoder.encode, block)

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


@contextlib.contextmanager
def as_here() -> Iterator[None]:
    """Keep from processes that the body starts what they must not have.

    That is this one's main module, which may be a script of the user's and would start all over;
    modules of the current folder in place of Python's; and Ctrl-C.
    """
    main, before = sys.modules["__main__"], os.environ.get("PYTHONSAFEPATH", "")
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    sys.modules["__main__"] = types.ModuleType("__main__")
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        yield
    finally:
        sys.modules["__main__"] = main
        os.environ["PYTHONSAFEPATH"] = before  # "" is as none
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
