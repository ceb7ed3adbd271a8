"""From a corpus to shards: tokenised once, by one process or by tasks side by side."""

import os
import re
import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager
from pathlib import Path

from torchmars.cluster.scheduler import TaskArray
from torchmars.config import ResolvedData
from torchmars.config.source import parse_source
from torchmars.core.console import say
from torchmars.core.cores import own_cores
from torchmars.core.errors import UserError
from torchmars.core.files import PARTIAL, remove
from torchmars.core.locks import locked
from torchmars.core.words import counted
from torchmars.data import foreign
from torchmars.data.corpus import Sizes
from torchmars.data.corpus_plan import CorpusPlan, begin_plan, has_plan, place_in_array, plan_corpus
from torchmars.data.documents import Encoded, Encoder, TextBlock
from torchmars.data.finish import check_damage, finish_folder, rename_folder
from torchmars.data.manifest import DataManifest, check_manifest, has_manifest, read_manifest
from torchmars.data.progress_bar import ProgressBar
from torchmars.data.reading import read_piece
from torchmars.data.tokenizer import TokenDtype, load_tokenizer, smallest_dtype
from torchmars.data.workers import Submit, start_workers
from torchmars.data.writer import LOCK_SECONDS, PieceWriter, read_progress

SIZES = Sizes()
# Files in a folder that is being made.
MADE = re.compile(r"(plan|manifest|sources)\.json|(piece|damaged|train|validation)-|damaged\.jsonl")
AHEAD = 2  # blocks that are read ahead for each process that tokenises
Submitted = tuple[PieceWriter, TextBlock | None, "Future[Encoded] | None"]


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
    if not has_manifest(folder) and parse_source(config.source).of_tokens:
        with turn(folder):
            if not has_manifest(folder):
                foreign.index(config, folder, sizes.shard_tokens)
    if not has_manifest(folder):
        plan = plan_corpus(config, sizes)
        try:
            # On several machines all begin with this; the others find it done.
            with turn(folder):
                begin_folder(plan, folder)
                if not isinstance(tasks, int):
                    task, tasks = place_in_array(partial_of(folder), task, tasks)
                if tasks == 1:
                    make_pieces(config, plan, folder, task, tasks, sizes)
            if tasks > 1:  # side by side
                make_pieces(config, plan, folder, task, tasks, sizes)
            with turn(folder):
                complete_folder(config, plan, folder, sizes)
        except OSError as error:
            raise UserError(
                f"cannot write the shards to {folder}: {error}: set data.path to a folder you can "
                "write"
            ) from None
    if not has_manifest(folder):
        return None
    found = read_manifest(folder)
    check_manifest(found, config, folder)
    return found


def partial_of(folder: Path) -> Path:
    """Return where a folder is made."""
    real = Path(os.path.realpath(folder))  # also where it is "."
    return real.with_name(real.name + PARTIAL)


def turn(folder: Path) -> AbstractContextManager[None]:
    """Hold the lock of a folder in the body, as soon as no other process holds it."""
    real = Path(os.path.realpath(folder))
    return locked(real.with_name(real.name + ".lock"), f"preparing {folder}", LOCK_SECONDS)


def begin_folder(plan: CorpusPlan, folder: Path) -> None:
    """Make the folder in which the pieces are made, or see that it was begun with the same plan.

    Raises `UserError` for another plan, and for a `folder` that holds other files.
    """
    partial = partial_of(folder)
    if has_manifest(folder) or has_manifest(partial):
        return
    if folder.exists() and any(folder.iterdir()):
        raise UserError(
            f"{folder} holds files but no manifest.json: set data.path to a new or empty folder"
        )
    if os.path.lexists(partial) and not has_plan(partial):
        remove_rest(partial)  # its removal was cut short
    begin_plan(plan, partial)


def remove_rest(partial: Path) -> None:
    """Delete the remains of a folder that was being made. Raises `UserError` for other files."""
    if not partial.is_symlink():
        found = partial.iterdir() if partial.is_dir() else [partial]
        others = sorted(path.name for path in found if path.is_dir() or not MADE.match(path.name))
        if others:
            raise UserError(
                f"{partial} is where the corpus is made, and {others[0]} is not of one: move it "
                "away, or set data.path to another folder"
            )
    remove(partial)


def make_pieces(
    config: ResolvedData, plan: CorpusPlan, folder: Path, task: int, tasks: int, sizes: Sizes
) -> None:
    """Make the pieces of the task that are not done.

    Raises `UserError` for more damaged records than the config allows.
    """
    partial = partial_of(folder)
    if has_manifest(folder) or has_manifest(partial):
        return
    progress = [read_progress(partial, number) for number in range(len(plan.pieces))]
    damaged = sum(each.damaged for each in progress)
    check_damage(config, damaged, partial)
    mine = [number for number in range(task, len(plan.pieces), tasks) if not progress[number].done]
    if not mine:
        return
    began = time.monotonic()
    encoder = make_encoder(config, sizes)
    total = sum(plan.piece_size(number) for number in mine)
    read = sum(progress[number].read for number in mine)
    processes = config.processes or own_cores()
    if encoder.kind != "hf":  # no more than there are blocks
        processes = max(1, min(processes, -(-(total - read) // sizes.block)))
    what = f"tokenising {config.source} ({config.tokenizer})"
    unit = " shards" if encoder.kind == "hf" else "B"
    with ProgressBar(what, total, read, unit) as bar, start_workers(encoder, processes) as submit:
        blocks = read_pieces(config, plan, partial, mine, encoder.dtype, sizes)
        for writer, block, future in in_order(blocks, submit, AHEAD * processes):
            before = writer.progress.read
            if block is None or future is None:
                writer.close(plan.piece_size(writer.number))
                bar.add(writer.progress.read - before)
                continue
            encoded = future.result()
            writer.add(block, encoded)
            bar.add(block.read - before, encoded)
            damaged += len(encoded.damaged)
            if damaged > config.max_damaged:
                writer.save()
                check_damage(config, damaged, partial)
    seconds = time.monotonic() - began
    say(
        f"tokenising took {seconds:,.1f} s: {bar.text / 1e6:,.1f} MB to {bar.tokens:,} tokens, "
        f"{bar.text / 1e6 / seconds:,.2f} MB/s with {counted(processes, 'process', 'processes')}",
        error=True,  # as the progress bar
    )


def make_encoder(config: ResolvedData, sizes: Sizes) -> Encoder:
    """Return the encoder that parses, splits and tokenises the corpus."""
    source = parse_source(config.source)
    return Encoder(
        source.kind,
        source.field,
        config.tokenizer,
        config.validation_fraction,
        smallest_dtype(load_tokenizer(config.tokenizer).vocab_size),
        sizes.document,
        config.begin_token,
    )


def read_pieces(
    config: ResolvedData,
    plan: CorpusPlan,
    partial: Path,
    numbers: list[int],
    dtype: TokenDtype,
    sizes: Sizes,
) -> Iterator[tuple[PieceWriter, TextBlock | None]]:
    """Yield the blocks that are left of pieces, each with its writer; None ends a piece."""
    source = parse_source(config.source)
    for number in numbers:
        if not has_plan(partial):  # gone once another process has made the folder complete
            return
        # A piece has one writer: another process may have been started on it too.
        writer = PieceWriter(partial, number, dtype, sizes.shard_tokens)
        if not has_plan(partial):
            return
        if not writer.progress.done:
            for block in read_piece(plan.pieces[number], source, writer.progress.position, sizes):
                yield writer, block
        yield writer, None


def in_order(
    blocks: Iterable[tuple[PieceWriter, TextBlock | None]], submit: Submit, ahead: int
) -> Iterator[Submitted]:
    """Yield blocks in their order, submitted; at most `ahead` after each are under way."""
    pending: deque[Submitted] = deque()
    for writer, block in blocks:
        pending.append((writer, block, submit(block) if block else None))
        if len(pending) > ahead:
            yield pending.popleft()
    yield from pending


def complete_folder(config: ResolvedData, plan: CorpusPlan, folder: Path, sizes: Sizes) -> None:
    """Make the folder complete if all pieces are done, and no other process has done so."""

    def texts_of(number: int) -> Iterator[str]:
        encoder, source = make_encoder(config, sizes), parse_source(config.source)
        for block in read_piece(plan.pieces[number], source, (0, 0, 0), sizes):
            yield from encoder.texts(block)

    partial = partial_of(folder)
    if has_manifest(folder):
        return
    if not has_manifest(partial):
        if not all(read_progress(partial, number).done for number in range(len(plan.pieces))):
            return
        finish_folder(config, plan, partial, texts_of)
    rename_folder(partial, Path(os.path.realpath(folder)))
