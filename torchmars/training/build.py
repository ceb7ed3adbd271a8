"""The four parts of a run, in the order in which they need each other: builders for `Trainer`."""

from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from torchmars.checkpoint.owned import OwnedFolders
from torchmars.checkpoint.saver import Saver
from torchmars.checkpoint.state_dict import seed_rng
from torchmars.config import ResolvedConfig
from torchmars.core.device import is_gpu
from torchmars.data.loader import Loader
from torchmars.data.mixture import MixedWindows, Mixture
from torchmars.data.named_tokenizers import load_tokenizer
from torchmars.data.tokenizer import Tokenizer
from torchmars.evaluation.results import Evaluation
from torchmars.evaluation.scoring import Scorer
from torchmars.metrics.events import EventLog
from torchmars.metrics.metrics import Metrics, open_metrics
from torchmars.models import Model, build_meta_model
from torchmars.models.documents import document_starts
from torchmars.optim import MARS
from torchmars.parallel.checks import check_layout
from torchmars.parallel.layout import Layout
from torchmars.parallel.parallel_model import ParallelModel
from torchmars.training.abilities import Abilities
from torchmars.training.checkpointer import Checkpointer, Resumed
from torchmars.training.ema import MovingAverage
from torchmars.training.optimizer import build_optimizer
from torchmars.training.preparation import evaluation_tasks, prepare_data, write_settings
from torchmars.training.reporter import RunReporter
from torchmars.training.schedule import Schedule
from torchmars.training.summary import introduction
from torchmars.training.validation import Validation


@dataclass(frozen=True)
class RunData:
    """The run's corpora, and their reader."""

    mixture: Mixture
    tokenizer: Tokenizer
    loader: Loader
    validation_windows: MixedWindows


def build_data(config: ResolvedConfig, layout: Layout) -> RunData:
    """Prepare the corpora where that is due, verify them, and open them at their start."""
    mixture = layout.on_first(lambda: prepare_data(config))
    training, world = config.training, layout.world
    # The first rank alone asks for size and time of every shard.
    train = layout.on_first(lambda: mixture.windows("train", training.seq_len))
    validation = layout.on_first(lambda: mixture.windows("validation", training.seq_len))
    # The ranks share the reading.
    layout.on_all(lambda: mixture.verify(config.data.verify, world.rank, world.size))
    microbatch_size, _ = training.microbatches(layout.data.size, config.parallelism.stages)
    loader = Loader(
        train,
        seed=config.run.seed,
        global_batch_size=training.global_batch_size,
        microbatch_size=microbatch_size,
        rank=layout.data.rank,
        ranks=layout.data.size,
        num_workers=config.data.num_workers,
        pin_memory=is_gpu(layout.device.type),
    )
    return RunData(mixture, load_tokenizer(config.data.tokenizer), loader, validation)


@dataclass(frozen=True)
class RunModel:
    """The model: whole but without memory, and as the ranks share it."""

    whole: Model
    parallel: ParallelModel
    average: MovingAverage | None
    """Of the weights, if the run keeps one."""


def build_model(config: ResolvedConfig, layout: Layout, data: RunData) -> RunModel:
    """Lay out the model over the ranks, with its initial weights."""
    training = config.training
    whole = build_meta_model(config.model, data.mixture.vocab_size, training.seq_len)
    # The launcher has asked already. Plain torchrun starts ranks without it.
    check_layout(config, config.parallelism.degrees(layout.world.size), whole)
    find_starts = partial(document_starts, end_of_text=data.tokenizer.end_of_text)
    model = ParallelModel(
        whole,
        config.parallelism,
        training,
        config.activation_checkpoint,
        layout,
        layout.device,
        find_starts=find_starts if config.data.separate_documents else None,
    )
    model.balance.exact = config.optimizer.mode == "exact"
    model.init_weights(config.run.seed)
    average = MovingAverage(model.weights, training.ema_decay) if training.ema_decay else None
    return RunModel(whole, model, average)


@dataclass(frozen=True)
class ResumedOptimizer:
    """The optimizer, and the checkpoints that keep its state and the rest of the run's."""

    optimizer: MARS
    schedule: Schedule
    checkpointer: Checkpointer
    resumed: Resumed


def resume_optimizer(
    config: ResolvedConfig,
    layout: Layout,
    data: RunData,
    model: RunModel,
    events: EventLog,
    failed: ExitStack,
) -> ResumedOptimizer:
    """Make the optimizer; resume it, the model and the data from the newest good checkpoint.

    `failed` is closed where the run cannot be built: it gives the run's folder back.
    """
    optimizer = build_optimizer(config, model.whole, model.parallel.weights, layout)
    whole = build_optimizer(config, model.whole)
    owned = OwnedFolders()
    saver = Saver(config.checkpoint, config.checkpoints, layout, owned, events.add, events.deleted)
    seed_rng(config.run.seed, 0, layout.world.rank)
    failed.callback(saver.release)
    owned.take(layout, config.run, config.checkpoints)
    checkpointer = Checkpointer(
        config, layout, model.parallel, optimizer, model.average, whole, saver, data.mixture
    )
    resumed = checkpointer.resume()
    data.loader.seek(resumed.state.position, resumed.state.shares)
    schedule = Schedule(config, optimizer)
    return ResumedOptimizer(optimizer, schedule, checkpointer, resumed)


@dataclass(frozen=True)
class RunReports:
    """The measurements of the run, and all that tells of it."""

    validation: Validation
    evaluation: Evaluation
    metrics: Metrics
    reporter: RunReporter


def build_reports(
    config: ResolvedConfig,
    layout: Layout,
    abilities: Abilities,
    data: RunData,
    model: RunModel,
    optimizer: ResumedOptimizer,
    events: EventLog,
) -> RunReports:
    """Open the files of the run's reports, unless it is complete."""
    state, mixture, parallel = optimizer.resumed.state, data.mixture, model.parallel
    validation = Validation(
        config.validation,
        mixture,
        data.validation_windows,
        data.loader.microbatch_size,
        parallel,
        data.tokenizer,
        layout,
    )
    scorer = Scorer(parallel, layout, data.tokenizer, config.evaluation.batch_size)
    evaluation = Evaluation(scorer, layout.on_first(lambda: evaluation_tasks(config)))
    complete = state.step >= config.training.steps
    if not complete:
        layout.on_first(lambda: write_settings(config))
    metrics = open_metrics(
        layout,
        config,
        state.step,
        state.validation_loss is not None,
        model.whole.flops_per_token(),
        events,
        optimizer.checkpointer.saver.owned.check_run,
        write=not complete,
    )
    whole = model.whole, optimizer.checkpointer.whole_optimizer
    lines = introduction(config, layout, abilities, *whole, mixture, optimizer.resumed)
    reporter = RunReporter(
        config, layout, optimizer.optimizer, metrics, events, lines, mixture, data.loader.epochs
    )
    return RunReports(validation, evaluation, metrics, reporter)
