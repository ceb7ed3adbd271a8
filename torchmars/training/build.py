"""From a config to the parts of a run, in the order in which they need each other."""

from functools import partial

from torchmars.checkpoint.folder import checkpoints
from torchmars.checkpoint.resume import newest_config
from torchmars.checkpoint.saver import Saver
from torchmars.checkpoint.state_dict import seed_rng
from torchmars.cluster.watchdog import Watchdog
from torchmars.config import ResolvedConfig
from torchmars.config.compile import eager_note, resolve_compile
from torchmars.config.dtypes import resolve_dtypes
from torchmars.core.console import labelled
from torchmars.core.files import lock
from torchmars.data.loader import Loader
from torchmars.data.mixture import MixedWindows, Mixture
from torchmars.data.tokenizer import load_tokenizer
from torchmars.evaluation.results import Evaluation
from torchmars.evaluation.scoring import Scorer
from torchmars.metrics.events import EventLog
from torchmars.metrics.metrics import open_metrics
from torchmars.models import build_meta_model
from torchmars.models.documents import document_starts
from torchmars.optim.passes import can_compile
from torchmars.optim.precision import multiplies_bfloat16
from torchmars.parallel.checks import check_layout
from torchmars.parallel.fsdp import weight_device
from torchmars.parallel.layout import Layout
from torchmars.parallel.parallel_model import ParallelModel
from torchmars.training.checkpointer import Checkpointer
from torchmars.training.ema import MovingAverage
from torchmars.training.optimizer import build_optimizer
from torchmars.training.preparation import evaluation_tasks, prepare_data, write_settings
from torchmars.training.profiler import Profiler
from torchmars.training.reporter import RunReporter
from torchmars.training.schedule import Schedule
from torchmars.training.summary import introduction
from torchmars.training.trainer import Trainer
from torchmars.training.validation import Validation


def build_trainer(config: ResolvedConfig, layout: Layout) -> Trainer:
    """Build a run: from its newest good checkpoint, or at its start. Called by every rank.

    Raises `UserError`, on every rank, for what the user got wrong.
    """
    weights = weight_device(config.parallelism, layout.device)
    native_bfloat16 = all(layout.on_all(lambda: multiplies_bfloat16(weights)))
    saved = layout.on_first(lambda: newest_config(checkpoints(config.run.checkpoints)))
    config = resolve_dtypes(config, layout.device, native_bfloat16, saved)
    able, tp = all(layout.on_all(lambda: can_compile(layout.device))), layout.group("tp").size
    config = resolve_compile(config, layout.device, able, tp, saved)

    training, seed = config.training, config.run.seed
    data = layout.on_first(lambda: prepare_data(config))
    whole = build_meta_model(config.model, data.vocab_size, training.seq_len)
    # The launcher has asked already. Plain torchrun starts ranks without it.
    check_layout(config, config.parallelism.degrees(layout.world.size), whole)
    windows, validation_windows = open_windows(config, data, layout)
    microbatch_size, _ = training.microbatches(layout.data.size, config.parallelism.stages)
    loader = Loader(
        windows,
        seed=seed,
        global_batch_size=training.global_batch_size,
        microbatch_size=microbatch_size,
        rank=layout.data.rank,
        ranks=layout.data.size,
        num_workers=config.data.num_workers,
        pin_memory=layout.device.type == "cuda",
    )
    tokenizer = load_tokenizer(config.data.tokenizer)
    find_starts = partial(document_starts, end_of_text=tokenizer.end_of_text)
    model = ParallelModel(
        whole,
        config.parallelism,
        training,
        config.activation_checkpoint,
        layout,
        layout.device,
        find_starts=find_starts if config.data.separate_documents else None,
    )
    model.init_weights(seed)
    max_grad_norm = training.max_grad_norm
    optimizer = build_optimizer(config.optimizer, max_grad_norm, whole, model.weights, layout)
    whole_optimizer = build_optimizer(config.optimizer, max_grad_norm, whole)
    optimizer.register_step_post_hook(lambda *_: model.follow_weights())
    average = MovingAverage(model.weights, training.ema_decay) if training.ema_decay else None
    if average is not None:
        optimizer.register_step_post_hook(lambda *_: average.update())

    events = EventLog(config.run.path if layout.first else None)
    saver = Saver(config.checkpoint, config.run.checkpoints, layout, events.add, events.deleted)
    seed_rng(seed, 0, layout.world.rank)
    lock_file = config.run.path / "lock"
    layout.on_first(lambda: lock(lock_file, f"training the run {config.run.path}"))
    checkpointer = Checkpointer(
        config, layout, model, optimizer, average, whole_optimizer, saver, data
    )
    resumed = checkpointer.resume()
    loader.seek(resumed.state.position, resumed.state.shares)

    schedule = Schedule(config.schedule, config.optimizer.lr, training.steps, optimizer)
    validation = Validation(
        config.validation,
        data,
        validation_windows,
        microbatch_size,
        model,
        tokenizer,
        layout,
    )
    evaluation = Evaluation(
        Scorer(model, layout, tokenizer, config.evaluation.batch_size),
        layout.on_first(lambda: evaluation_tasks(config)),
    )
    complete = resumed.state.step >= training.steps
    if not complete:
        layout.on_first(lambda: write_settings(config))
    metrics = open_metrics(
        layout,
        config,
        resumed.state.step,
        resumed.state.validation_loss is not None,
        whole.flops_per_token(),
        events,
        write=not complete,
    )
    lines = introduction(config, layout, whole, whole_optimizer, data, native_bfloat16, resumed)
    if note := eager_note(config, layout.device, able, tp):
        lines += labelled("note", note)
    return Trainer(
        config,
        layout,
        model=model,
        optimizer=optimizer,
        schedule=schedule,
        loader=loader,
        validation=validation,
        evaluation=evaluation,
        checkpointer=checkpointer,
        reporter=RunReporter(
            config, layout, optimizer, metrics, events, lines, data, loader.epochs
        ),
        metrics=metrics,
        profiler=Profiler(config.profiler, config.run.path / "profile", layout),
        watchdog=Watchdog(config.run.hang, layout, config.guards.hang_seconds, saver.group),
        lock=lock_file,
        resumed=resumed,
    )


def open_windows(
    config: ResolvedConfig, data: Mixture, layout: Layout
) -> tuple[MixedWindows, MixedWindows]:
    """Open the training and the validation windows, then verify the shards.

    The ranks share the reading.
    """
    seq_len, world = config.training.seq_len, layout.world
    train, validation = data.windows("train", seq_len), data.windows("validation", seq_len)
    layout.on_all(lambda: data.verify(config.data.verify, world.rank, world.size))
    return train, validation
