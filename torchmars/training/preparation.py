"""All of a run that needs no ranks: its data, and whether it can resume from its checkpoints."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torchmars.checkpoint.folder import check_place, checkpoints
from torchmars.cluster import process
from torchmars.config import ResolvedConfig
from torchmars.config.load import config_text
from torchmars.core.console import say
from torchmars.core.errors import UserError, file_errors, needs_package
from torchmars.core.files import check_writable, write_durably
from torchmars.core.words import counted
from torchmars.data.manifest import Level, has_manifest, read_manifest
from torchmars.data.prepare import prepare_shards
from torchmars.data.tokenizer import FileTokenizer, load_tokenizer
from torchmars.data.windows import Mixture, MixturePart
from torchmars.models import build_run_model
from torchmars.parallel.checks import check_layout
from torchmars.parallel.float8 import check_package
from torchmars.records.trackers import check_trackers
from torchmars.training.optimizer import build_optimizer

if TYPE_CHECKING:
    from torchmars.evaluation.tasks import Tasks


def prepare_run(config: ResolvedConfig, ranks: int | Sequence[int], nodes: int) -> None:
    """Prepare a run of `ranks` ranks on `nodes` machines, and print its data.

    Where it may go on with other numbers of ranks, `ranks` has all of them, the most last. Raises
    `UserError` for anything that would end it at its start.
    """
    numbers = [ranks] if isinstance(ranks, int) else ranks
    process.check_devices(numbers[-1] // nodes)
    vocab_size = load_tokenizer(config.data.tokenizer).vocab_size
    model = build_run_model(config, vocab_size)
    for number in numbers:
        check_layout(config, config.parallelism.degrees(number), model)
    check_trackers(config.metrics)
    check_package(config.training.float8)
    evaluation_tasks(config)  # a mistake ends the start, not the run at its first evaluation
    check_place(config.checkpoints, config.run.path)
    # The ranks share the reading of every byte.
    level: Level = "off" if config.data.verify == "off" else "size"
    data = prepare_data(config)
    data.verify(level)
    optimizer = config.optimizer.settings()
    if optimizer["by_role"] or optimizer["by_pattern"]:  # else it fits every model
        build_optimizer(config, model)
    if checkpoints(config.checkpoints) or config.checkpoint.init_from:
        # torch's checkpoints come with it: time that a new run does not take.
        from torchmars.training.checkpointer import check_resume

        check_resume(config, data, model)
    for part in data.parts:
        for name, split in part.manifest.splits.items():
            say(
                f"{part.folder}: {name} {split.tokens:,} tokens ({part.manifest.tokenizer}) "
                f"in {counted(split.documents, 'document')}"
            )


def evaluation_tasks(config: ResolvedConfig) -> "Tasks | None":
    """Return the tasks that the model is asked while it trains, if there are any.

    Raises `UserError` for a task that cannot be read.
    """
    section = config.evaluation
    try:
        names = section.tasks if section.interval else []
        return read_tasks(names, section.shots, section.limit)
    except UserError as error:
        raise UserError(f"evaluation.tasks: {error}") from None


def read_tasks(names: Sequence[str], shots: int | None, limit: int | None) -> "Tasks | None":
    """Return the tasks of some names. Only where there are any, lm_eval is imported.

    Raises `UserError`.
    """
    if not names:
        return None
    with needs_package("lm_eval", "a task", "eval"):
        from torchmars.evaluation.tasks import Tasks
    return Tasks(names, shots, limit)


def prepare_data(config: ResolvedConfig) -> Mixture:
    """Return the run's corpora, whose shards are made first if there are none.

    Raises `UserError` if the shards do not fit the model or the batch.
    """
    training = config.training
    if not all(has_manifest(Path(corpus.path)) for corpus in config.data.corpora()):
        build_run_model(config, 1)  # mistakes, before minutes of work
    for corpus in config.data.corpora():
        prepare_shards(corpus)
    data = prepared_data(config)
    assert data is not None  # there are no other tasks
    model = build_run_model(config, data.vocab_size)
    data.check(model.vocab_rows, training.seq_len, training.global_batch_size)
    data.pack(training.seq_len)
    return data


def prepared_data(config: ResolvedConfig) -> Mixture | None:
    """Return the run's corpora; None if the shards of one are not made yet."""
    data, folders = config.data, [Path(corpus.path) for corpus in config.data.corpora()]
    if not all(map(has_manifest, folders)):
        return None
    names = [part.label for part in data.mixture] or [data.source]
    weights = [part.weight for part in data.mixture] or [1.0]
    parts = zip(names, folders, weights, map(read_manifest, folders))
    return Mixture([MixturePart(*part) for part in parts], data.packing)


def write_settings(config: ResolvedConfig) -> None:
    """Write the resolved config of a run into its folder, and its tokenizer if that is a file.

    Raises `UserError` if one of them, or a checkpoint later, cannot be written.
    """
    folder = config.run.path
    if isinstance(config.checkpoints, Path):
        own = config.checkpoint.folder is None
        check_writable(config.checkpoints, "run.folder" if own else "checkpoint.folder")
    tokenizer = load_tokenizer(config.data.tokenizer)
    with file_errors(f"cannot write to {folder}", "set run.folder to a folder you can write"):
        folder.mkdir(parents=True, exist_ok=True)
        write_durably(folder / "config.toml", config_text(config))
        if isinstance(tokenizer, FileTokenizer):
            tokenizer.copy_to(config.run.tokenizer)
