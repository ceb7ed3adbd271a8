"""A run's one handle on its checkpoints: resume, save."""

import contextlib
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import PurePath
from typing import Literal

from torch import Tensor

from torchmars.checkpoint import manifest as manifests
from torchmars.checkpoint import state_dict
from torchmars.checkpoint.folder import checkpoints, step_of
from torchmars.checkpoint.manifest import CheckpointManifest, DamagedCheckpoint
from torchmars.checkpoint.memory import OPTION
from torchmars.checkpoint.memory.copies import MemoryCopies
from torchmars.checkpoint.resume import check_same_run, newest_good, read_verified
from torchmars.checkpoint.saver import OwnedFolders, Saver
from torchmars.config import ParallelismConfig, ResolvedConfig
from torchmars.core.errors import UserError
from torchmars.data.order import Shares, shares_from_start
from torchmars.data.windows import Mixture
from torchmars.exchange.saved_model import check_init_from, init_from
from torchmars.models import Model
from torchmars.optim import MARS
from torchmars.parallel.parallel_model import ParallelModel
from torchmars.records.events import EventLog
from torchmars.training.guards import recent
from torchmars.training.optimizer import MovingAverage, build_optimizer


@dataclass
class RunState:
    """The state of a run after a step. It is the same on every rank."""

    step: int = 0
    """Optimizer steps made."""
    position: int = 0
    """Samples of the global data order consumed."""
    validation_loss: float | None = None
    """The validation loss at this step, if it was measured."""
    recent_losses: deque[float] = field(default_factory=recent)
    """Losses of the last steps without outliers, oldest first."""
    shares: Shares = field(default_factory=Shares)
    """How samples are assigned to the parts of the mixture."""


@dataclass
class Resumed:
    """Where a run resumes, and from which file."""

    state: RunState
    origin: str | None = None
    """The source of the resumed state, in words; None for a new run."""
    changes: list[str] = field(default_factory=list)
    """Of the config since the checkpoint, a line each."""


class Checkpointer:
    """Loads a run's checkpoints into its model and optimizer, and saves them.

    Every rank makes the same calls. `average` is that of the weights, if the run keeps one. `data`
    are the run's corpora. `events` are told of saves.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        model: ParallelModel,
        optimizer: MARS,
        average: MovingAverage | None,
        data: Mixture,
        events: EventLog,
    ) -> None:
        self.config, self.layout = config, model.layout
        self.model, self.optimizer, self.average = model, optimizer, average
        self.averages = self.average.values if self.average else {}
        self.whole_optimizer = build_optimizer(config, self.model.whole)
        """The optimizer of the whole model, without memory."""
        self.data, self.fingerprint = data, data.fingerprint()
        self.saver = Saver(config, self.layout, OwnedFolders(), record=events.add)
        self.memory: MemoryCopies | None = None

    @contextlib.contextmanager
    def _without_copies_after_errors(self) -> Iterator[None]:
        """Go on without copies in memory, on every rank, when the body raises `UserError`."""
        try:
            yield
        except UserError as error:
            self.memory = None
            self.layout.say(f"warning: {OPTION} makes no copies from here on: {error}")

    def resume(self) -> Resumed:
        """Go on from the run's newest copy or good checkpoint, or from checkpoint.init_from.

        The run's folders are this process's from now on, until `saver.release`.
        """
        settings, run = self.config.checkpoint, self.config.run
        state_dict.seed_rng(run.seed, 0, self.layout.world.rank)
        self.saver.owned.take(self.layout, run, self.config.checkpoints)
        if settings.memory_interval:
            with self._without_copies_after_errors():
                self.memory = MemoryCopies(self.layout, self._tensors())
        if (resumed := self._load_copy() or self.load_newest()) is not None:
            return resumed
        start = RunState(shares=shares_from_start(self.data.weights))
        if settings.init_from is None:
            return Resumed(start)
        source, without = init_from(
            settings.init_from,
            settings.init_optimizer,
            self.layout,
            self.model,
            self.optimizer,
        )
        if self.average:
            self.average.begin()
        self.optimizer.skip_next_correction(without)
        self._forget_look_ahead()
        return Resumed(start, f"from the {source}")

    def _load_copy(self) -> Resumed | None:
        """Load the newest copy in memory; None if there is none, or a later checkpoint."""
        if self.memory is None:
            return None
        found = self.layout.on_first(lambda: checkpoints(self.saver.folder))
        copy = None
        with self._without_copies_after_errors():
            copy = self.memory.newest(least=step_of(found[-1]) if found else 0)
        if copy is None:
            return None
        manifest, parts = copy
        name = PurePath("the copy in memory")
        changes = self._check_same_run(name, manifest)
        state_dict.load_copy(
            parts, manifest, self.layout, self.model, self.optimizer, self.averages
        )
        return self._resumed(name, manifest, changes)

    def load_newest(self) -> Resumed | None:
        """Load the run's newest good checkpoint; return None if the run has none.

        Raises `UserError` if there are some, but none is good.
        """
        self.saver.wait()
        found = self.layout.on_first(lambda: checkpoints(self.saver.folder))
        newest = newest_good(found, self.load, warn=self.layout.say)
        return newest[1] if newest else None

    def load(self, folder: PurePath) -> Resumed:
        """Verify the checkpoint `folder`, and load it into model and optimizer.

        Raises `DamagedCheckpoint` or, if it is another run's, `UserError`, on every rank.
        """
        layout, config, world = self.layout, self.config, self.layout.world
        level = config.checkpoint.verify
        manifest = layout.on_first(lambda: manifests.read(folder))
        layout.on_all(lambda: manifests.verify(folder, manifest, level, world.rank, world.size))
        changes = self._check_same_run(folder, manifest)
        if (
            not state_dict.load_checkpoint(
                folder, manifest, layout, self.model, self.optimizer, self.averages
            )
            and self.average
        ):  # training.ema_decay is new
            self.average.begin()
        return self._resumed(folder, manifest, changes)

    def _check_same_run(self, folder: PurePath, manifest: CheckpointManifest) -> list[str]:
        """Return how the config has changed. Raises `UserError` on every rank for another run's."""
        config, optimizer = self.config, self.whole_optimizer
        return self.layout.on_first(
            lambda: check_same_run(folder, manifest, config, self.fingerprint, optimizer)
        )

    def _resumed(
        self, folder: PurePath, manifest: CheckpointManifest, changes: list[str]
    ) -> Resumed:
        """Return where the run resumes, now that the tensors of `folder` are loaded."""
        config, world = self.config, self.layout.world
        if manifest.world_size != world.size:
            changes.append(f"ranks {manifest.world_size} -> {world.size}")
        # Another commit may have had other settings.
        saved, known = manifest.config.get("parallelism", {}), vars(config.parallelism)
        layout = ParallelismConfig(**{name: saved[name] for name in saved.keys() & known.keys()})
        before = layout.degrees(manifest.world_size)
        changes += before.changes(config.parallelism.degrees(world.size))
        if len(manifest.shares.weights) != len(self.data.parts):
            raise DamagedCheckpoint(f"{folder} has the shares of other parts than its data has")
        shares = manifest.shares.changed(self.data.weights, manifest.position)
        weights = zip(self.data.names, manifest.shares.weights, shares.weights)
        changes += [
            f"weight of {name} in data.mixture {old:g} -> {new:g}"
            for name, old, new in weights
            if old != new
        ]
        state = RunState(
            manifest.step,
            manifest.position,
            manifest.validation_loss,
            recent(manifest.recent_losses),
            shares,
        )
        size = manifest.config["training"].get("global_batch_size")
        if size != config.training.global_batch_size or shares is not manifest.shares:
            self._forget_look_ahead()
        return Resumed(state, f"from step {state.step}: {folder}", changes)

    def _forget_look_ahead(self) -> None:
        """Leave exact mode's next correction out: another batch comes than was looked ahead to."""
        if self.optimizer.exact:
            self.optimizer.skip_next_correction(self.optimizer.state)

    def save(self, state: RunState) -> float:
        """Save the run, or begin to; return the seconds that training waited.

        Raises `UserError` if too many saves in a row have failed.
        """
        return self.saver.save(self._manifest(state), self._tensors())

    def keep(self, state: RunState) -> None:
        """Keep a copy of the run in memory, where there is room."""
        if self.memory is not None:
            with self._without_copies_after_errors():
                self.memory.keep(self._manifest(state), self._tensors())

    def is_kept(self) -> bool:
        """Wait until the copy in memory is complete on all machines; return whether there is one.

        False where the run makes none.
        """
        if self.memory is not None:
            with self._without_copies_after_errors():
                self.memory.finish()
        return self.memory is not None

    def before_change(self) -> None:
        """Let the change of weights and state that comes wait for copies that are being made."""
        self.saver.before_change()
        if self.memory is not None:
            self.memory.before_change()

    def _manifest(self, state: RunState) -> CheckpointManifest:
        """Return all about the run after a step but its tensors."""
        return CheckpointManifest(
            step=state.step,
            position=state.position,
            world_size=self.layout.world.size,
            data_fingerprint=self.fingerprint,
            vocab_size=self.data.vocab_size,
            optimizer=state_dict.optimizer_state_names(self.whole_optimizer),
            config=asdict(self.config),
            validation_loss=state.validation_loss,
            recent_losses=list(state.recent_losses),
            shares=state.shares,
            tokenizer_sha256=self.data.parts[0].manifest.tokenizer_sha256,
        )

    def _tensors(self) -> dict[str, Tensor]:
        """Return the tensors of the run that this rank has a part of, by name."""
        return state_dict.training_state(self.layout, self.model, self.optimizer, self.averages)


def check_resume(config: ResolvedConfig, data: Mixture, model: Model) -> None:
    """Raise `UserError` if the run can neither resume from a checkpoint of its own nor start.

    `model` is on the meta device. The bytes of checkpoints are left to the ranks.
    """
    level: Literal["off", "size"] = "off" if config.checkpoint.verify == "off" else "size"
    found = newest_good(
        checkpoints(config.checkpoints),
        lambda path: read_verified(path, level),
        warn=lambda text: None,
    )
    if found:
        optimizer = build_optimizer(config, model)
        check_same_run(*found, config, data.fingerprint(), optimizer)
    elif config.checkpoint.init_from:
        check_init_from(config, model)
