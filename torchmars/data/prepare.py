"""From a corpus to shards: tokenised once, by one process or by tasks side by side."""

import contextlib
import json
import multiprocessing
import os
import signal
import sys
import time
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torchmars.cluster.scheduler import TaskArray
from torchmars.config import ResolvedData
from torchmars.config.source import parse_source
from torchmars.core.console import say
from torchmars.core.cores import own_cores
from torchmars.core.errors import UserError, file_errors
from torchmars.core.files import PARTIAL, read_text, write_durably
from torchmars.core.locks import locked
from torchmars.core.typed import make, parse_json
from torchmars.core.words import counted
from torchmars.data import foreign
from torchmars.data.corpus import Input, Sizes, source_files
from torchmars.data.documents import Encoded, Encoder, TextPart, begin_worker, encode_block
from torchmars.data.manifest import (
    DataManifest,
    check_manifest,
    first_difference,
    has_manifest,
    read_manifest,
    shard_settings,
)
from torchmars.data.progress_bar import ProgressBar
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
PLAN, ARRAY = "plan.json", "array.json"
VARIABLES = {"PYTHONSAFEPATH": "1", "PYTHONWARNINGS": "ignore:resource_tracker"}
AHEAD = 2  # blocks that are read ahead for each process that tokenises
Block = list[TextPart]
Submit = Callable[[Block], "Future[Encoded]"]


@dataclass
class CorpusPlan:
    """What a folder is made from. Tasks side by side, and a start that resumes, must agree."""

    made_from: dict[str, Any]
    """Settings, and size and time of each file of the corpus."""
    files: dict[str, int]
    """The bytes of each file."""
    pieces: list[list[Input]]

    def size(self, number: int) -> int:
        """Return the bytes of a piece; 1 for a shard of a data set."""
        return sum(each.size for each in self.pieces[number])


def prepare_shards(config: ResolvedData) -> DataManifest:
    """Return the manifest of the shards in data.path, which are made first if there are none.

    Raises `UserError` if they were made from something else than `config` asks for. Their bytes
    are left to `check_shards`.
    """
    manifest = prepare_task(config, 0, 1)
    assert manifest is not None  # there are no other tasks
    return manifest


def prepare_task(
    config: ResolvedData, task: int, tasks: int | TaskArray | None, sizes: Sizes = SIZES
) -> DataManifest | None:
    """Make the shards of pieces `task`, `task + tasks`, ... of the corpus.

    Or `task` is a number in an array of tasks (`place_in_array`). Whoever finds that all pieces are
    done makes the folder complete. Returns its manifest, or None if other tasks are not done
    yet. Raises `UserError`.
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
    found = read_manifest(folder)
    check_manifest(found, config, folder)
    return found


def make_folder(
    config: ResolvedData, folder: Path, task: int, tasks: int | TaskArray | None, sizes: Sizes
) -> None:
    """Make a task's pieces, and the folder complete if all are done. Raises `UserError`."""
    real = Path(os.path.realpath(folder))  # also where it is "."
    partial = real.with_name(real.name + PARTIAL)
    with turn(folder):
        if has_manifest(folder):
            return
        if has_manifest(partial):  # a process ended here
            rename_folder(partial, real, read_manifest(partial))
            return
        plan = begin_plan(config, folder, partial, sizes)
        if not isinstance(tasks, int):
            task, tasks = place_in_array(partial, task, tasks)
    make_pieces(config, plan, partial, range(task, len(plan.pieces), tasks), sizes)
    with turn(folder):
        if not has_manifest(folder) and not has_manifest(partial):
            parts = [finished_part(partial, number) for number in range(len(plan.pieces))]
            done = [part for part in parts if part]
            if len(done) < len(parts):
                return
            finish_folder(config, done, plan.files, partial)
        if not has_manifest(folder):
            rename_folder(partial, real, read_manifest(partial))


def lock_of(folder: Path) -> Path:
    """Return the file that whoever makes a folder locks."""
    real = Path(os.path.realpath(folder))
    return real.with_name(real.name + ".lock")


@contextlib.contextmanager
def turn(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder in the body, as soon as no other process holds it.

    A corpus that cannot be found leaves no folder behind.
    """
    file = lock_of(folder)
    missing = [parent for parent in file.parents if not parent.exists()]
    with locked(file, f"preparing {folder}", LOCK_SECONDS):
        try:
            yield
        finally:
            file.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # something is in it
                for parent in missing:
                    parent.rmdir()


def begin_plan(config: ResolvedData, folder: Path, partial: Path, sizes: Sizes) -> CorpusPlan:
    """Return the plan of a folder, which is begun with it in `partial` if it was not yet.

    Raises `UserError` if it was begun with another one, or where there are other files.
    """
    source = parse_source(config.source)
    made_from = shard_settings(config) | asdict(sizes)
    files = {}
    own = [lock_of(folder), partial, Path(os.path.realpath(folder))]  # a glob may match them
    for file in source_files(config):
        if isinstance(file, Path) and any(map(Path(os.path.realpath(file)).is_relative_to, own)):
            continue
        with file_errors(f"cannot read {file} of the corpus"):
            files[str(file)], changed = size_and_time(file)
        made_from[str(file)] = f"{files[str(file)]:,} bytes, written at {changed / 1e9}"
    plan = partial / PLAN
    if plan.exists():
        try:
            begun = make(CorpusPlan, parse_json(read_text(plan)))
        except (OSError, ValueError, UserError) as error:
            raise UserError(
                f"{plan} cannot be read ({error}): remove the folder {partial} to start over"
            ) from None
        if found := first_difference(begun.made_from, made_from):
            raise UserError(
                f"{folder} was begun with {found}: set it back, or remove the folder {partial} to "
                "start over"
            )
        return begun
    for place in (folder, partial):
        others = sorted(place.iterdir()) if place.is_dir() else [place] if place.exists() else []
        if any(not file.name.startswith(PLAN) for file in others):
            raise UserError(
                f"{place} holds {others[0].name}, but no manifest.json or {PLAN}: move it away, or "
                "set data.path to another folder"
            )
    load_tokenizer(config.tokenizer).encode_batch(["a"])  # its files are there
    made = CorpusPlan(made_from, files, corpus_pieces(source, files, sizes))
    partial.mkdir(parents=True, exist_ok=True)
    write_durably(plan, json.dumps(asdict(made)))
    return made


def place_in_array(partial: Path, number: int, array: TaskArray | None) -> tuple[int, int]:
    """Return which of how many tasks the one of a number is, in the array that began a folder.

    Some tasks of it that are submitted again make a smaller `array`, or one whose numbers do not
    follow each other, None. Raises `UserError` for a number of none.
    """
    file = partial / ARRAY
    begun = make(TaskArray, parse_json(read_text(file))) if file.exists() else None
    if array and (begun is None or array.count >= begun.count):
        write_durably(file, json.dumps(asdict(array)))
        begun = array
    if begun is None or (place := begun.place(number)) is None:
        known = f"were {begun.first} to {begun.last}" if begun else "are not known"
        raise UserError(
            f"task {number} of the array: the tasks that began {partial} {known}: say which of how "
            "many tasks this is by --task and --tasks"
        )
    return place, begun.count


def make_pieces(
    config: ResolvedData, plan: CorpusPlan, partial: Path, mine: Iterable[int], sizes: Sizes
) -> None:
    """Make those pieces that are not done. Raises `UserError`, also for too much damage."""
    parts = [finished_part(partial, number) for number in range(len(plan.pieces))]
    damaged = [each for part in parts if part for each in part.damaged]
    check_damage(damaged, plan.files)
    mine = [number for number in mine if not parts[number]]
    if not mine:
        return
    began = time.monotonic()
    source, vocab_size = parse_source(config.source), load_tokenizer(config.tokenizer).vocab_size
    encoder = Encoder(
        source.kind,
        source.field,
        config.tokenizer,
        config.validation_fraction,
        smallest_dtype(vocab_size),
        sizes.document,
        config.begin_token,
    )
    total, plan_file = sum(plan.size(number) for number in mine), partial / PLAN
    processes = config.processes or own_cores()
    if source.kind != "hf":  # no more than there are blocks
        processes = max(1, min(processes, -(-total // sizes.block)))

    def blocks() -> Iterator[tuple[PieceWriter, Block | None]]:
        """Yield the blocks of pieces, each with its writer; None ends a piece."""
        for number in mine:
            if not plan_file.exists():  # another process has made the folder complete
                return
            writer = PieceWriter(partial, number, encoder.dtype, sizes.shard_tokens)
            if not plan_file.exists():  # while this one has waited
                return
            if not writer.done:
                for block in read_piece(plan.pieces[number], source, sizes):
                    yield writer, block
            yield writer, None

    what = f"tokenising {config.source} ({config.tokenizer})"
    unit = " shards" if source.kind == "hf" else "B"
    with ProgressBar(what, total, 0, unit) as bar, start_pool(encoder, processes) as submit:
        for writer, block, future in in_order(blocks(), submit, AHEAD * processes):
            if block is None or future is None:
                writer.close()
                continue
            encoded = future.result()
            writer.add(encoded)
            bar.add(sum(part.read for part in block), encoded)
            damaged += encoded.damaged
            if encoded.damaged:
                check_damage(damaged, plan.files)
    seconds = time.monotonic() - began
    say(
        f"tokenising took {seconds:,.1f} s: {bar.text / 1e6:,.1f} MB to {bar.tokens:,} tokens, "
        f"{bar.text / 1e6 / seconds:,.2f} MB/s with {counted(processes, 'process', 'processes')}",
        error=True,  # as the progress bar
    )


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
    """Let `count` processes tokenise what the body submits. One is this process itself.

    Raises `UserError` where one of them dies. They end with the body, and with this process.
    """
    if count == 1:

        def encode(block: Block) -> "Future[Encoded]":
            future: Future[Encoded] = Future()
            future.set_result(encoder.encode(block))
            return future

        yield encode
        return
    context = multiprocessing.get_context("spawn")
    others = set(multiprocessing.active_children())
    with as_here():
        pool = ProcessPoolExecutor(count, context, begin_worker, (encoder,))

    def submit(block: Block) -> "Future[Encoded]":
        with as_here():  # it may start a process
            return pool.submit(encode_block, block)

    try:
        yield submit
    except BaseException as error:
        for process in set(multiprocessing.active_children()) - others:
            process.kill()
        if isinstance(error, BrokenProcessPool):
            raise UserError(
                "a process that tokenises has died: start again to continue; with less memory, set "
                "data.processes lower"
            ) from None
        raise
    finally:
        pool.shutdown(cancel_futures=True)


@contextlib.contextmanager
def as_here() -> Iterator[None]:
    """Keep from processes that the body starts what they must not have.

    That is this one's main module, which may be a script of the user's and would start all over;
    modules of the current folder in place of Python's; Ctrl-C; and a warning of what this process
    leaves behind if it is killed.
    """
    main, before = sys.modules["__main__"], {name: os.environ.get(name, "") for name in VARIABLES}
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    sys.modules["__main__"] = types.ModuleType("__main__")
    os.environ.update(VARIABLES)
    try:
        yield
    finally:
        sys.modules["__main__"] = main
        os.environ.update(before)  # "" is as none
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
