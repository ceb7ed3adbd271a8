"""The training loop, in time order."""

import gc
import time
from collections.abc import Callable
from dataclasses import astuple

from torch import Tensor

from torchmars.cluster import process
from torchmars.cluster.process import StopSignals
from torchmars.cluster.watchdog import Watchdog
from torchmars.config import ResolvedConfig
from torchmars.core.device import is_gpu
from torchmars.core.errors import UserError
from torchmars.core.files import is_gone
from torchmars.data.loader import Loader
from torchmars.evaluation.scoring import Report, measures_in_words
from torchmars.optim import MARS
from torchmars.parallel.layout import FlagExchange
from torchmars.parallel.parallel_model import ParallelModel
from torchmars.records.speed import OTHER
from torchmars.training.checkpointer import Checkpointer, Resumed
from torchmars.training.ending import REGROUP, STOP, Endings, StepFlags
from torchmars.training.guards import LossGuard
from torchmars.training.optimizer import MovingAverage, Schedule
from torchmars.training.profiler import Profiler
from torchmars.training.reporter import RunReporter
from torchmars.training.validation import Validation

MOST_STEPS = 100  # between two collections of garbage
LAUNCHER_SECONDS = 5.0  # for the launcher of a signalled rank to say what becomes of the run


class Trainer:
    """The steps of one run on one layout, from where it was `resumed`: see `build_trainer`.

    Every rank makes the same calls. Raises `UserError`, on every rank, for what the user got wrong.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        model: ParallelModel,
        optimizer: MARS,
        average: MovingAverage | None,
        loader: Loader,
        checkpointer: Checkpointer,
        resumed: Resumed,
        reporter: RunReporter,
        validation: Validation,
        ask_tasks: Callable[[Report], dict[str, dict[str, float]]] | None,
    ) -> None:
        self.config, self.layout, self.loader = config, model.layout, loader
        self.model, self.optimizer, self.average = model, optimizer, average
        self.schedule = Schedule(config, optimizer)
        self.checkpointer, self.resumed, self.state = checkpointer, resumed, resumed.state
        self.validation, self.ask_tasks = validation, ask_tasks
        self.reporter, self.metrics = reporter, reporter.metrics
        self.enter_phase = self.metrics.throughput.phases.enter
        self.profiler = Profiler(config.profiler, config.run.path / "profile", self.layout)
        self.watchdog = Watchdog(config.run.hang, self.layout, config.guards.hang_seconds)
        self.signals, self.garbage = StopSignals(), GarbageCollection()
        self.flags: FlagExchange
        """The `StepFlags` that ranks exchange during a step."""
        self.loss_guard = LossGuard(config.guards)

    def run(self) -> int:
        """Train from the step reached to the last one; validate, save and report on the way.

        Returns the exit code: 0, 75 for a run that a signal stopped; `EXIT_REGROUP` where it goes
        on with other machines.
        """
        try:
            if self.state.step >= self.config.training.last_step:
                return 0
            self.reporter.report_start(self.resumed)
            with self.signals, self.watchdog, self.profiler, self.garbage:
                try:
                    code = self.train()
                finally:
                    self.checkpointer.saver.close()
            if not code and self.config.validation.sample_tokens:
                self.reporter.report_sample(self.state.step, self.validation.sample())
            if self.state.step == self.config.training.steps:
                self.reporter.report_complete(self.state.step)
        except UserError as error:
            self.reporter.events.add("failed", self.state.step, message=str(error))
            raise
        finally:
            self.loader.close()
            self.metrics.close()
        return code

    def train(self) -> int:
        """Make the steps that are left; return the exit code, which is 0 if all were made."""
        state, config, last = self.state, self.config, self.config.training.last_step
        endings = Endings(config, self.checkpointer)
        ending = None
        if state.step and state.validation_loss is None and self.due(config.validation.interval):
            self.validate()  # a signal stopped the run before it could
        while ending is None and state.step < last:
            step = state.step + 1
            reported = step == 1 or self.due(config.metrics.log_interval, step=step)
            self.model.attention_logits.measures = reported and config.metrics.attention
            with self.profiler.step(step):
                loss, lr = self.train_step()
            flags = self.agreed_events()
            state.step, state.validation_loss = step, None
            if reported:
                self.loss_guard.check_skipped(self.reporter.report(state, loss, lr), step)
            if reported or step % MOST_STEPS == 0:
                self.garbage.collect()
            self.reporter.report_epochs()
            ending = endings.after_step(step, flags)
            with self.metrics.throughput.paused():
                if ending is None or ending is REGROUP:  # else a machine has to end
                    if self.due(config.validation.interval):
                        self.validate()
                    if self.ask_tasks is not None and self.due(config.evaluation.interval):
                        self.evaluate(self.ask_tasks)
                saved = (ending is not None and ending.save) or self.due(
                    config.checkpoint.interval, config.checkpoint.at_end
                )
                if saved:
                    self.save()
            if ending is not None:
                ending = endings.if_kept(ending, state, saved, self.save)
            elif self.due(config.checkpoint.memory_interval, at_end=False):
                self.checkpointer.keep(state)
            self.watchdog.beat(f"step {step + 1}")
        self.watchdog.beat("the last save")
        if ending in (None, STOP):
            self.checkpointer.saver.finish()
        if ending is STOP:
            self.reporter.report_stop(state.step, self.signal)
        elif ending is None and last < config.training.steps:
            self.reporter.report_stop(last, "training.stop_after")
        return 0 if ending is None else ending.code

    def train_step(self) -> tuple[Tensor, float]:
        """Make one optimizer step; return this rank's mean loss and the learning rate."""
        state, optimizer, enter_phase = self.state, self.optimizer, self.enter_phase
        enter_phase("data")
        lr = self.schedule.apply(state.step + 1)
        batch = self.loader.step()
        state.position = self.loader.position
        next_batch = self.loader.peek() if optimizer.exact else None
        self.flags = self.exchange_flags()
        if next_batch is not None:
            self.look_ahead(next_batch)
        loss = self.model.backward(batch, enter_phase)
        enter_phase(OTHER)
        outlier = self.loss_guard.active and self.check_loss(loss)
        self.checkpointer.before_change()
        enter_phase("optimizer")
        if outlier:
            optimizer.skip()
        else:
            optimizer.step()
        applied = optimizer.skipped[1] == 0  # those in a row up to now
        if not outlier:
            self.model.clip_logits(applied)
            self.model.follow_weights()
            if self.average is not None:
                self.average.update()
        self.model.balance.finish(applied)
        optimizer.zero_grad()
        if is_gpu(self.layout.device.type) and state.step + 1 < self.config.training.last_step:
            enter_phase("data")  # while the device works
            self.model.batches.prefetch(self.loader.peek())
        enter_phase(OTHER)
        return loss, lr

    @property
    def signal(self) -> str | None:
        """The signal that this rank or, in an elastic run, its launcher was sent, in words."""
        return process.asked()[1] or self.signals.received

    def look_ahead(self, next_batch: list[Tensor]) -> None:
        """Take the next batch's gradient at these weights: exact mode corrects its step by it."""
        self.model.backward(next_batch, self.enter_phase, ahead=True)
        self.enter_phase("optimizer")
        self.checkpointer.before_change()
        self.optimizer.look_ahead()
        self.optimizer.zero_grad()

    def check_loss(self, loss: Tensor) -> bool:
        """Return whether the loss of the step under way is an outlier; report it if so."""
        mean = self.layout.mean_loss(loss)
        outlier = self.loss_guard.check(mean, self.state.recent_losses)
        if outlier:
            self.reporter.report_spike(mean, self.state)
        return outlier

    def exchange_flags(self) -> FlagExchange:
        """Start to send this rank's flags to the others. The step does not wait for it.

        What happens later is told at the next step.
        """
        how, _ = process.asked()
        own = self.signals.received is not None
        if process.fewest_ranks() is not None:  # its launcher, which is told too, may leave alone
            own = own and not how and time.monotonic() - self.signals.received_at > LAUNCHER_SECONDS
        flags = StepFlags(
            stop=how == "stop" or own,
            gone=self.layout.first and is_gone(self.config.run.lock),
            regroup=how == "memory",
            save=how == "save",
        )
        return self.layout.exchange_flags(*astuple(flags))

    def agreed_events(self) -> StepFlags:
        """Return the flags set on any rank. Raises `UserError` if the run folder is gone."""
        flags = StepFlags(*self.flags.result())
        if flags.gone:
            raise UserError(
                f"{self.config.run.lock} is gone after step {self.state.step}: the run folder was "
                "deleted, moved or unmounted while the run went on. Put it back, and start the run "
                "again"
            )
        return flags

    def due(self, interval: int, at_end: bool | None = None, step: int | None = None) -> bool:
        """Return whether something done every `interval` steps (0: never) and `at_end` is due.

        By default it is done at the end too where it is done at all. `step` is by default the last
        one that was made.
        """
        step = self.state.step if step is None else step
        ends = interval > 0 if at_end is None else at_end
        return (ends and step == self.config.training.last_step) or (
            interval > 0 and step % interval == 0
        )

    def validate(self) -> None:
        """Measure and report the validation loss."""
        self.watchdog.beat(f"the validation after step {self.state.step}")
        loss, bits, of_parts = self.validation.losses()
        self.state.validation_loss = loss
        self.metrics.validation(self.state.step, loss, bits, of_parts)

    def evaluate(self, ask: Callable[[Report], dict[str, dict[str, float]]]) -> None:
        """Ask the model the tasks, and report how it answered."""
        step = self.state.step
        work = f"the evaluation after step {step}"
        self.watchdog.beat(work)
        for task, values in ask(lambda _: self.watchdog.beat(work)).items():
            self.metrics.evaluation(step, task, values, measures_in_words(task, values))

    def save(self) -> None:
        """Save the step just made, or begin to."""
        self.watchdog.beat(f"saving step {self.state.step}")
        self.metrics.sync()
        stall = {"stall_ms": 1e3 * self.checkpointer.save(self.state)}
        self.metrics.write(self.state.step, "checkpoint", stall)


class GarbageCollection:
    """While it is active, Python looks for garbage where `collect` is called only.

    By itself it would do so in the middle of a step, on each rank in another one, and all ranks
    wait for the one that does. A step leaves little: some objects of pipelines and of tensor
    parallelism, and no tensors.
    """

    def __enter__(self) -> "GarbageCollection":
        gc.disable()
        return self

    def __exit__(self, *_: object) -> None:
        gc.unfreeze()
        gc.enable()

    def collect(self) -> None:
        """Free objects that nothing can reach any more.

        Objects that exist the first time live as long as the run, and are not examined again.
        """
        gc.collect()
        if not gc.get_freeze_count():
            gc.freeze()
