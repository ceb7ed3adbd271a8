"""The training loop, in time order."""

from collections import Counter
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from torchmars.checkpoint import manifest as manifests
from torchmars.checkpoint import state
from torchmars.checkpoint.folder import checkpoints, step_folder
from torchmars.checkpoint.initial import init_from
from torchmars.checkpoint.manifest import CheckpointManifest
from torchmars.checkpoint.resume import check_same_run, newest_config, newest_good
from torchmars.checkpoint.saver import Saver
from torchmars.cluster.signals import StopSignals
from torchmars.cluster.watchdog import Watchdog
from torchmars.config import Config
from torchmars.config.dtypes import resolve_dtypes, slow_warning
from torchmars.config.load import config_text
from torchmars.core.errors import EXIT_STOPPED, UserError
from torchmars.core.files import is_gone, lock, write_durably
from torchmars.data import sources
from torchmars.data.loader import Loader, Windows, validation_batches
from torchmars.data.shards import SPLITS, check_shards
from torchmars.data.tokenizer import TOKENIZERS
from torchmars.metrics.metrics import open_metrics
from torchmars.metrics.throughput import Stopwatch
from torchmars.models import build_meta_model
from torchmars.models.initialize import init_weights
from torchmars.optim import between, lr_factor
from torchmars.optim.precision import multiplies_bfloat16
from torchmars.parallel.layout import Layout
from torchmars.parallel.recipe import parallelize
from torchmars.training.build import build_optimizer
from torchmars.training.guards import SpikeGuard
from torchmars.training.preparation import prepare_data
from torchmars.training.sampling import sample_text
from torchmars.training.step import backward, token_losses
from torchmars.training.summary import summary

MAX_SKIPPED_IN_A_ROW = 10
MAX_ROLLBACKS = 3  # to one checkpoint


class Trainer:
    """One run on one layout: builds everything, continues from the newest checkpoint, trains to the last step.

    Every rank makes the same calls. Raises `UserError`, on every rank, for what the user got wrong.
    """

    def __init__(self, config: Config, layout: Layout) -> None:
        self.fast = all(layout.agree(lambda: multiplies_bfloat16(layout.device)))
        saved = layout.on_first(lambda: newest_config(checkpoints(config.run.checkpoints)))
        config = resolve_dtypes(config, layout.device, self.fast, saved)
        self.config, self.layout = config, layout
        training = config.training
        self.microbatch_size, _ = training.microbatches(layout.data.size)

        folder = Path(config.data.path)
        self.manifest = layout.on_first(lambda: prepare_data(config))
        windows, self.validation_windows = (
            Windows(folder, self.manifest.splits[name], self.manifest.dtype, training.seq_len)
            for name in SPLITS
        )
        layout.agree(
            lambda: check_shards(self.manifest, folder, layout.world.rank, layout.world.size)
        )
        self.data = self.manifest.fingerprint()
        self.loader = Loader(
            windows,
            seed=config.run.seed,
            global_batch_size=training.global_batch_size,
            microbatch_size=self.microbatch_size,
            rank=layout.data.rank,
            ranks=layout.data.size,
            num_workers=config.data.num_workers,
            pin_memory=layout.device.type == "cuda",
        )

        self.model = build_meta_model(
            config.model, self.manifest.vocab_size, config.training.seq_len
        )
        self.flops_per_token = self.model.flops_per_token()
        parallelize(self.model, layout.shard_mesh, getattr(torch, training.dtype), training.compile)
        self.model.to_empty(device=layout.device)
        init_weights(self.model, config.run.seed)
        self.optimizer = build_optimizer(config, self.model)
        self.base_lrs = [group["lr"] for group in self.optimizer.param_groups]
        self.base_gammas = [group["gamma"] for group in self.optimizer.param_groups]
        self.stopwatch = Stopwatch(layout.device)

        self.saver = Saver(config.checkpoint, config.run.checkpoints, layout)
        self.spikes = SpikeGuard(config.guards)
        self.rollbacks: Counter[int] = Counter()  # by the checkpoint's step

        self.step = 0
        self.validation_loss: float | None = None  # at this step
        self.changes: list[str] = []  # of the config, since the checkpoint
        self.without_last_grad: list[
            Tensor
        ] = []  # what starts from state of another optimizer or other data
        state.seed_rng(config.run.seed, 0, layout.group("random").rank)
        self.lock = config.run.path / "lock"
        layout.on_first(lambda: lock(self.lock, f"training the run {config.run.path}"))
        self.origin = self.resume()

    def resume(self) -> str | None:
        """Go on from the run's newest good checkpoint, or start from checkpoint.init_from; where the run comes from, in words."""
        settings = self.config.checkpoint
        folder = self.load_newest()
        if folder is not None:
            return f"from step {self.step}: {folder}"
        if settings.init_from is None:
            return None
        said, self.without_last_grad = init_from(
            Path(settings.init_from),
            settings.init_optimizer,
            self.layout,
            self.model,
            self.optimizer,
        )
        self.forget_the_look_ahead()
        return f"from the {said}"

    def load_newest(self) -> Path | None:
        """Load the run's newest good checkpoint and return its folder; None where the run has no checkpoint."""
        self.saver.wait()
        found = newest_good(
            self.layout.on_first(lambda: checkpoints(self.config.run.checkpoints)),
            self.load,
            warn=self.layout.say,
        )
        return found and found[0]

    def load(self, folder: Path) -> CheckpointManifest:
        """Verify the checkpoint `folder` and load it. Raises `DamagedCheckpoint` or, where it is another run's, `UserError`, on every rank."""
        layout, config = self.layout, self.config
        manifest = layout.on_first(lambda: manifests.read(folder))
        layout.agree(
            lambda: manifests.verify(
                folder, manifest, config.checkpoint.verify, layout.world.rank, layout.world.size
            )
        )
        self.changes = layout.on_first(
            lambda: check_same_run(folder, manifest, config, self.data, self.optimizer)
        )
        state.load(folder, manifest, layout, self.model, self.optimizer)
        if manifest.world_size != layout.world.size:
            self.changes.append(f"ranks {manifest.world_size} -> {layout.world.size}")
        self.step, self.validation_loss = manifest.step, manifest.validation_loss
        self.loader.seek(manifest.position)
        self.spikes.recent.clear()
        self.spikes.recent.extend(manifest.recent_losses)
        was = manifest.config["training"].get("global_batch_size")
        if was != config.training.global_batch_size:
            self.forget_the_look_ahead()
        return manifest

    def forget_the_look_ahead(self) -> None:
        """Exact mode: the last gradient is not of the batch that comes next."""
        if self.optimizer.exact:
            self.without_last_grad = list(self.optimizer.state)

    def run(self) -> int:
        """Train from the step reached to training.steps; validate, save and report on the way. The exit code: 0, or 75 when stopped by a signal."""
        config = self.config
        self.announce()
        if self.step >= config.training.steps:
            return 0
        self.layout.on_first(self.write_resolved_config)
        self.metrics = open_metrics(
            self.layout,
            config,
            self.step,
            self.validation_loss is not None,
            self.flops_per_token,
        )
        hang = config.run.path / "hang"
        try:
            with (
                StopSignals() as self.signals,
                Watchdog(
                    hang, self.layout, config.guards.hang_seconds, self.saver.group
                ) as self.watchdog,
            ):
                try:
                    complete = self.train()
                finally:
                    self.saver.close()
            if complete and config.validation.sample_tokens:
                self.layout.say("sample:\n" + self.sample())
        finally:
            self.loader.close()
            self.metrics.close()
        return 0 if complete else EXIT_STOPPED

    def train(self) -> bool:
        """The steps that are left; whether all were made, or a signal ended them early."""
        config, last, epoch = self.config, self.config.training.steps, self.loader.epoch
        if (
            self.step and self.validation_loss is None and self.validation_due()
        ):  # stopped by a signal before it could
            self.validate()
        while self.step < last:
            made = self.train_step()
            signalled, overdue, changed, gone = self.layout.any(
                self.signals.received is not None,
                self.saver.overdue(),
                self.loader.changed is not None,
                self.layout.first and is_gone(self.lock),
            )
            if gone:
                raise UserError(
                    f"{self.lock} is gone after step {self.step}: the run folder was "
                    "deleted, moved or unmounted while the run went on. "
                    "Put it back, and start the run again"
                )
            if changed:  # the step is worth nothing, and nothing of it was reported or saved
                self.layout.agree(self.loader.check)
            if made is None:
                self.roll_back()
                continue
            self.step, self.validation_loss = self.step + 1, None
            if due(self.step, config.metrics.log_interval, last) or self.step == 1:
                self.report(*made)
            if self.loader.epoch != epoch:
                epoch = self.loader.epoch
                self.layout.say(
                    f"epoch {epoch + 1} begins: the data has been read {epoch} times, and is read again in another order"
                )
            stop = signalled and self.step < last
            with self.metrics.throughput.paused():
                if self.validation_due() and not stop:
                    self.validate()
                if stop or overdue or due(self.step, config.checkpoint.interval, last):
                    self.save()
            self.watchdog.beat(f"step {self.step + 1}")
            if stop:
                break
        self.watchdog.beat("the last save")
        self.saver.finish()
        if self.step < last:
            self.layout.say(
                f"stopped   by {self.signals.received or 'a signal to another rank'} after step {self.step}, saved; the same command goes on"
            )
        return self.step == last

    def report(self, loss: Tensor, lr: float) -> None:
        """Report the step just made. Waits for the device."""
        told = self.optimizer.telemetry()
        tokens = self.loader.position * self.config.training.seq_len
        self.metrics.train(
            self.step,
            self.layout.mean_loss(loss),
            lr,
            told | {"tokens": tokens, "optimizer_ms": self.stopwatch.milliseconds()},
        )
        self.refuse_to_go_on_skipping(told)

    def train_step(self) -> tuple[Tensor, float] | None:
        """One optimizer step: this rank's mean loss and the learning rate; None where the loss stands out and the run is to go back."""
        lr = self.set_hyperparameters()
        batch = self.loader.step()
        if (
            self.optimizer.exact
        ):  # the next batch's gradient at these weights corrects the next step
            backward(self.model, self.loader.peek())
            self.optimizer.look_ahead()
            self.optimizer.zero_grad()
        loss = backward(self.model, batch)
        stands_out = self.spikes.active and self.stands_out(loss)
        if stands_out and self.config.guards.loss_spike == "rollback":
            self.optimizer.zero_grad()
            return None
        if self.without_last_grad:
            self.optimizer.start_last_grads(self.without_last_grad)
            self.without_last_grad = []
        with self.stopwatch:
            self.optimizer.skip() if stands_out else self.optimizer.step()
        self.optimizer.zero_grad()
        return loss, lr

    def stands_out(self, loss: Tensor) -> bool:
        """Whether the loss of the step under way is a spike; says so."""
        mean = self.layout.mean_loss(loss)
        if not self.spikes.stands_out(mean):
            return False
        self.layout.say(
            f"spike     loss {mean:.4f} at step {self.step + 1}, samples {self.loader.position - self.config.training.global_batch_size} to "
            f"{self.loader.position - 1}: guards.loss_spike = {self.config.guards.loss_spike}"
        )
        return True

    def roll_back(self) -> None:
        """Go back to the newest checkpoint, and on with the data after the batch that made the loss stand out."""
        position, reached = self.loader.position, self.step
        self.watchdog.beat("a rollback")
        folder = self.load_newest()
        if folder is None:
            raise UserError(
                f"the loss stood out at step {reached + 1}, and there is no checkpoint to go back to: lower optimizer.lr, raise "
                "guards.spike_sigmas, or lower checkpoint.interval"
            )
        self.rollbacks[self.step] += 1
        if self.rollbacks[self.step] > MAX_ROLLBACKS:
            raise UserError(
                f"the loss stood out after each of {MAX_ROLLBACKS} returns to {folder}: lower optimizer.lr or raise guards.spike_sigmas"
            )
        self.loader.seek(position)
        self.forget_the_look_ahead()
        self.layout.on_first(
            lambda: self.metrics.rewind(self.step, self.validation_loss is not None)
        )
        self.layout.say(
            f"rollback  to step {self.step}: {folder}; the data goes on at sample {position}"
        )

    def refuse_to_go_on_skipping(self, told: dict[str, float]) -> None:
        """Raise `UserError` once every one of the last steps was skipped for its gradient."""
        if told["skipped_in_a_row"] >= MAX_SKIPPED_IN_A_ROW:
            spikes = (
                ", or their losses stood out (guards.spike_sigmas)" if self.spikes.active else ""
            )
            steps = f"the last {told['skipped_in_a_row']:.0f} steps up to {self.step}"
            raise UserError(
                f"{steps} were skipped, since their gradients were not finite or too "
                f"large to compute with{spikes}: "
                f"lower optimizer.lr, or go on from the newest checkpoint with another setting"
            )

    def set_hyperparameters(self) -> float:
        """Set every group's learning rate and gamma for the step to come; returns the matrices' learning rate."""
        schedule, base, total = (
            self.config.schedule,
            self.config.optimizer.lr,
            self.config.training.steps,
        )
        factor = lr_factor(
            self.step + 1,
            total,
            name=schedule.name,
            floor=schedule.min_lr / base,
            warmup_steps=schedule.warmup_steps,
            decay_steps=schedule.decay_steps,
        )
        for group, base_lr, gamma in zip(
            self.optimizer.param_groups, self.base_lrs, self.base_gammas
        ):
            group["lr"] = base_lr * factor
            if schedule.final_gamma is not None:
                group["gamma"], group["gamma_next"] = (
                    between(step, total, gamma, schedule.final_gamma, schedule.gamma)
                    for step in (self.step + 1, self.step + 2)
                )
        return base * factor

    def validation_due(self) -> bool:
        """Whether the validation loss is to be measured at this step."""
        interval = self.config.validation.interval
        return interval > 0 and due(self.step, interval, self.config.training.steps)

    def validate(self) -> None:
        """Measure and report the validation loss."""
        self.watchdog.beat(f"the validation after step {self.step}")
        self.validation_loss = self.mean_validation_loss()
        self.metrics.validation(self.step, self.validation_loss)

    @torch.no_grad()
    def mean_validation_loss(self) -> float:
        """The mean loss over the validation windows, the same ones on every layout."""
        total = torch.zeros(
            2, dtype=torch.float64, device=self.layout.device
        )  # sum of losses, targets
        batches: list[tuple[Tensor, int]] = []
        self.layout.agree(
            lambda: batches.extend(
                validation_batches(
                    self.validation_windows,
                    self.config.validation.windows,
                    self.microbatch_size,
                    self.layout.data.rank,
                    self.layout.data.size,
                )
            )
        )  # before the first pass, which needs all ranks
        self.model.eval()
        for tokens, count in batches:
            losses = token_losses(self.model, tokens)[:count]
            total += torch.tensor([losses.double().sum(), losses.numel()], device=total.device)
        self.model.train()
        mean_sum, mean_count = (self.layout.mean_loss(part) for part in total)
        return mean_sum / mean_count

    def save(self) -> None:
        """Save the step just made, or begin to."""
        self.watchdog.beat(f"saving step {self.step}")
        manifest = CheckpointManifest(
            step=self.step,
            position=self.loader.position,
            world_size=self.layout.world.size,
            data_fingerprint=self.data,
            vocab_size=self.manifest.vocab_size,
            optimizer=state.optimizer_state_names(self.optimizer),
            config=asdict(self.config),
            validation_loss=self.validation_loss,
            recent_losses=list(self.spikes.recent),
        )
        self.metrics.sync()
        self.metrics.stall(
            self.step,
            self.saver.save(
                manifest, state.training_state(self.layout, self.model, self.optimizer)
            ),
        )

    def sample(self) -> str:
        """A text by the model as it is now. Every rank takes part."""
        self.model.eval()
        with torch.compiler.set_stance(
            "force_eager"
        ):  # every length of context would be compiled anew
            return sample_text(
                self.model,
                TOKENIZERS[self.config.data.tokenizer](),
                self.config.validation.sample_prompt,
                self.config.validation.sample_tokens,
                temperature=0.8,
                device=self.layout.device,
            )

    def write_resolved_config(self) -> None:
        """Leave the settings that this run has in its folder, as a config that reproduces it."""
        folder = self.config.run.path
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_durably(folder / "config.toml", config_text(self.config))
        except OSError as error:
            raise UserError(
                f"cannot write to {folder}: {error.strerror}: set run.folder to a folder you can write"
            ) from None

    def announce(self) -> None:
        """Say what this run is about to do."""
        config, training = self.config, self.config.training
        tokens = self.manifest.splits["train"].tokens
        per_step = training.global_batch_size * training.seq_len
        self.layout.say(f"run       {config.run.path}, seed {config.run.seed}")
        for line in summary(config, self.layout, self.model, self.optimizer):
            self.layout.say(line)
        warning = slow_warning(config, matrices=bool(self.optimizer.plans.owner_loads))
        if warning and not self.fast:
            self.layout.say(f"warning   {warning}")
        self.layout.say(
            f"data      {config.data.path}: {tokens:,} {self.manifest.tokenizer} tokens; {training.steps} steps read "
            f"{training.steps * per_step:,} ({training.steps * per_step / tokens:.2f} epochs)"
        )
        if self.layout.first and (warning := sources.warning(config.data)):
            self.layout.say(warning)
        if self.step >= training.steps:
            self.layout.say(
                f"complete  all {training.steps} steps are done: {step_folder(config.run.checkpoints, self.step)}. "
                f"To go on: --training.steps {self.step + training.steps}"
            )
        elif self.origin:
            for change in self.changes:
                self.layout.say(f"changed   {change}")
            self.layout.say(f"continue  {self.origin}")


def due(step: int, interval: int, last: int) -> bool:
    """Whether something done every `interval` steps (0: never) and after the last one is due after `step`."""
    return step == last or (interval > 0 and step % interval == 0)
