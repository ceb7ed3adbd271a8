"""Builds a run on its ranks: its parts are made in the order in which they need each other."""

import os
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from torchmars.checkpoint.folder import checkpoints
from torchmars.checkpoint.resume import newest_config
from torchmars.cluster import process
from torchmars.config import ResolvedConfig, TrainingConfig
from torchmars.config.ranks import resolve_compile, resolve_dtypes
from torchmars.core.device import DETERMINISTIC, add_up_in_float32
from torchmars.data.loader import Loader
from torchmars.data.tokenizer import Tokenizer, load_tokenizer
from torchmars.data.windows import MixedWindows
from torchmars.evaluation.scoring import Scorer
from torchmars.exchange.saved_model import find_folder, is_of_hub
from torchmars.models import build_run_model
from torchmars.models.base import factors_of
from torchmars.models.documents import document_starts
from torchmars.optim.compiling import can_compile
from torchmars.optim.matrices.agreement import multiplies_bfloat16
from torchmars.parallel.checks import check_layout
from torchmars.parallel.fsdp import weight_device
from torchmars.parallel.layout import Layout
from torchmars.parallel.parallel_model import ParallelModel
from torchmars.records.events import EventLog, MachinesBefore, machines_before
from torchmars.records.lines import METRICS_FILE, Journal, last_step
from torchmars.records.metrics import Metrics
from torchmars.records.speed import Throughput
from torchmars.records.trackers import Tracker, open_trackers
from torchmars.training.checkpointer import Checkpointer, RunState
from torchmars.training.optimizer import MovingAverage, build_optimizer
from torchmars.training.preparation import evaluation_tasks, prepare_data, write_settings
from torchmars.training.reporter import RunReporter
from torchmars.training.summary import introduction
from torchmars.training.trainer import Trainer
from torchmars.training.validation import Validation


def apply_determinism(training: TrainingConfig) -> None:
    """Let this process compute as `training.deterministic` says, before any GPU is used.

    A sum whose order is left to threads differs in its last bits from time to time. On GPUs these
    are sums by atomic additions, kernels that are chosen by their time, and collectives in a
    switch. Variables that are set already stay.
    """
    if not training.deterministic:
        return
    for name, value in DETERMINISTIC.items():
        os.environ.setdefault(name, value)
    # An operation that knows no one order raises an error. Torch's compiler then chooses kernels by
    # rules instead of by their time.
    torch.use_deterministic_algorithms(True)
    # Nothing here reads such memory. mypy does not know the name, a property of the module.
    setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # noqa: B010
    add_up_in_float32()


def build_trainer(config: ResolvedConfig, layout: Layout) -> Trainer:
    """Build a run: from its newest good checkpoint, or at its start. Called by every rank.

    Raises `UserError`, on every rank, for what the user got wrong.
    """
    config, native_bfloat16, compiles = resolve_on_ranks(config, layout)
    data = layout.on_first(lambda: prepare_data(config))
    seq_len, world = config.training.seq_len, layout.world
    # The ranks share the reading.
    layout.on_all(lambda: data.verify(config.data.verify, world.rank, world.size))
    loader = build_loader(config, layout, data.windows("train", seq_len))
    tokenizer = load_tokenizer(config.data.tokenizer, config.data.begin_token)
    model = lay_out_model(config, layout, data.vocab_size, tokenizer)
    decay = config.training.ema_decay
    average = MovingAverage(model.weights, decay) if decay else None
    optimizer = build_optimizer(config, model.whole, model.weights, layout)
    events = EventLog(config.run.path if layout.first else None)
    checkpointer = Checkpointer(config, model, optimizer, average, data, events)
    with ExitStack() as failed:
        # A notebook continues, and must not keep the run's folder then.
        failed.callback(checkpointer.saver.release)
        resumed = checkpointer.resume()
        loader.load_state_dict({"position": resumed.state.position, "shares": resumed.state.shares})
        whole = model.whole, checkpointer.whole_optimizer
        can = native_bfloat16, compiles
        layout.say(*introduction(config, layout, *can, *whole, data, resumed))
        tasks = layout.on_all(lambda: evaluation_tasks(config))
        scorer = Scorer(model, tokenizer, config.evaluation.batch_size)
        metrics, before = open_reports(config, layout, checkpointer, resumed.state)
        reporter = RunReporter(config, model, optimizer, data, loader, metrics, events, before)
        batch_size = loader.microbatch_size
        windows = data.windows("validation", seq_len)
        validation = Validation(config.validation, model, data, windows, batch_size, tokenizer)
        trainer = Trainer(
            config,
            model,
            optimizer,
            average,
            loader,
            checkpointer,
            resumed,
            reporter,
            validation,
            None if tasks is None else partial(tasks.ask, scorer),
        )
        failed.pop_all()
    return trainer


def resolve_on_ranks(config: ResolvedConfig, layout: Layout) -> tuple[ResolvedConfig, bool, bool]:
    """Return `config` with all resolved that ranks must find out, and what all ranks can.

    That is whether they multiply bfloat16 fast, and whether they compile.
    Raises `UserError`, on every rank, for a model of the hub that cannot be fetched.
    """
    device = layout.device
    weights = weight_device(config.parallelism, device)
    native_bfloat16 = layout.agree(lambda: multiplies_bfloat16(weights))
    saved = layout.on_first(lambda: newest_config(checkpoints(config.checkpoints)))
    source = layout.on_first(lambda: resolve_source(config.checkpoint.init_from, saved))
    config = resolve_dtypes(config, device, native_bfloat16, saved)
    compiles = layout.agree(lambda: can_compile(device))
    config = resolve_compile(config, device, compiles, layout.group("tp").size, saved)
    config = replace(config, checkpoint=replace(config.checkpoint, init_from=source))
    return config, native_bfloat16, compiles


def resolve_source(source: str | None, saved: dict[str, Any] | None) -> str | None:
    """Return checkpoint.init_from, in which a model of the hub has its commit; fetch it.

    A run that has a checkpoint, with the config `saved`, keeps its commit. Raises `UserError`.
    """
    if source is None or not is_of_hub(source):
        return source
    if saved is None:
        return find_folder(source)[1]
    before = str(saved["checkpoint"].get("init_from"))
    return before if before.partition("@")[0] == source.partition("@")[0] else source


def build_loader(config: ResolvedConfig, layout: Layout, windows: MixedWindows) -> Loader:
    """Make the reader of this rank's microbatches, at the start of the data."""
    training = config.training
    microbatch_size, _ = training.microbatches(layout.data.size, config.parallelism.stages)
    return Loader(
        windows,
        seed=config.run.seed,
        global_batch_size=training.global_batch_size,
        microbatch_size=microbatch_size,
        rank=layout.data.rank,
        ranks=layout.data.size,
        device=layout.device,
    )


def lay_out_model(
    config: ResolvedConfig, layout: Layout, vocab_size: int, tokenizer: Tokenizer
) -> ParallelModel:
    """Lay out the model over the ranks, with its initial weights."""
    whole = build_run_model(config, vocab_size)
    # The launcher has asked already. Plain torchrun starts ranks without it.
    check_layout(config, config.parallelism.degrees(layout.world.size), whole)
    find_starts = partial(
        document_starts,
        end_of_text=tokenizer.end_of_text,
        begin_token=tokenizer.begin_token,
    )
    model = ParallelModel(
        whole,
        config.parallelism,
        config.training,
        config.activation_checkpoint,
        layout,
        layout.device,
        find_starts=find_starts if config.data.separate_documents else None,
        exact=config.optimizer.mode == "exact",
    )
    factors = factors_of(whole, config.transfer)
    model.init_weights(config.run.seed, None if factors is None else factors.std)
    return model


def open_reports(
    config: ResolvedConfig, layout: Layout, checkpointer: Checkpointer, state: RunState
) -> tuple[Metrics, MachinesBefore | None]:
    """Open the files of the run's reports, to continue after `state`, unless it is complete.

    Lines of later steps are dropped, and of a validation at this one that `state` lacks. Returns on
    the first rank also the machines of an elastic run before this start. Raises `UserError` on
    every rank if a file cannot be written.
    """
    training, step = config.training, state.step
    flops_per_token = checkpointer.model.whole.flops_per_token()
    speed = Throughput(
        step, training.tokens_per_step, flops_per_token, layout.device, layout.world.size
    )

    def open_files() -> tuple[Journal, list[Tracker], MachinesBefore | None]:
        elastic = process.fewest_ranks() is not None
        before = machines_before(config.run.path) if elastic else None
        write_settings(config)
        journal = Journal(config.run.path / METRICS_FILE, checkpointer.saver.owned.check_run)
        reached = last_step(journal.file)
        journal.rewind(step, validated=state.validation_loss is not None)
        return journal, open_trackers(config, step, reached), before

    complete = step >= training.last_step
    opened = None if complete else layout.only_first(open_files)
    journal, trackers, before = opened or (None, [], None)
    return Metrics(journal, trackers, speed, training.steps, layout.device), before
