"""The training loop, in time order."""

from dataclasses import asdict
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from torchmars import checkpoint
from torchmars.build import build_meta_model, build_optimizer
from torchmars.config import Config
from torchmars.config_file import write_config
from torchmars.data.loader import Loader, Windows, validation_batches
from torchmars.data.shards import check_shards
from torchmars.data.tokenizer import TOKENIZERS
from torchmars.errors import UserError
from torchmars.generate import sample_text
from torchmars.metrics import Metrics, Stopwatch
from torchmars.models.initialize import init_weights
from torchmars.models.parallelize import parallelize, reduce_gradients
from torchmars.optim import between, lr_factor
from torchmars.parallel.mesh import Layout
from torchmars.prepare import prepare_shards


MAX_SKIPPED_IN_A_ROW = 10


class Trainer:
    """One run on one layout: builds everything, continues from the newest checkpoint, trains to the last step.

    Every rank makes the same calls. Raises `UserError`, on every rank, for what the user got wrong.
    """

    def __init__(self, config: Config, layout: Layout) -> None:
        self.config, self.layout = config, layout
        training = config.training
        self.microbatch_size, self.accumulation_steps = training.microbatches(layout.size)

        folder = Path(config.data.path)
        self.manifest = layout.on_first(lambda: prepare_shards(config))
        layout.agree(lambda: check_shards(self.manifest, folder, layout.rank, layout.size))
        self.data = self.manifest.fingerprint()
        self.loader = Loader(Windows(folder, self.manifest.splits["train"], training.seq_len), seed=config.run.seed,
                             global_batch_size=training.global_batch_size, microbatch_size=self.microbatch_size,
                             rank=layout.rank, ranks=layout.size, num_workers=config.data.num_workers,
                             pin_memory=layout.device.type == "cuda")
        self.validation_windows = Windows(folder, self.manifest.splits["validation"], training.seq_len)

        self.model = build_meta_model(config, self.manifest)
        self.flops_per_token = self.model.flops_per_token()
        parallelize(self.model, layout.mesh, self.compute_dtype(), training.compile)
        self.model.to_empty(device=layout.device)
        init_weights(self.model, config.run.seed)
        self.optimizer = build_optimizer(config, self.model)
        self.base_lrs = [group["lr"] for group in self.optimizer.param_groups]
        self.base_gammas = [group["gamma"] for group in self.optimizer.param_groups]
        self.stopwatch = Stopwatch(layout.device)

        self.step = 0
        torch.manual_seed(config.run.seed + layout.rank)
        self.resumed_from = self.resume()

    def compute_dtype(self) -> torch.dtype:
        """training.dtype, with "auto" resolved for the device."""
        name = self.config.training.dtype
        return getattr(torch, {"cuda": "bfloat16", "cpu": "float32"}[self.layout.device.type] if name == "auto" else name)

    def resume(self) -> Path | None:
        """Go on from the run's newest checkpoint, if it has one; returns its folder."""
        found = self.layout.on_first(lambda: checkpoint.check_resume(self.config, self.data, self.optimizer))
        if found is None:
            return None
        folder, meta = found
        checkpoint.load(folder, meta, self.layout, self.model, self.optimizer)
        self.step = meta.step
        self.loader.seek(meta.position)
        return folder

    def run(self) -> None:
        """Train from the step reached to training.steps; validate, save and report on the way."""
        config, last = self.config, self.config.training.steps
        self.announce()
        if self.step >= last:
            return
        began_at = self.step
        self.layout.on_first(self.write_resolved_config)
        metrics = Metrics(config, self.layout.first, self.step, self.layout.device, self.layout.size, self.flops_per_token)
        self.layout.on_first(metrics.open)

        while self.step < last:
            loss, lr = self.train_step()
            self.step += 1
            if due(self.step, config.metrics.log_interval, last) or self.step == began_at + 1:
                told = self.optimizer.telemetry()
                metrics.train(self.step, self.layout.mean(loss), lr, told | {"optimizer_ms": self.stopwatch.milliseconds()})
                self.refuse_to_go_on_skipping(told)
            with metrics.paused():
                if config.validation.interval and due(self.step, config.validation.interval, last):
                    metrics.validation(self.step, self.validate())
                if due(self.step, config.checkpoint.interval, last):
                    self.say(f"checkpoint {self.save()}")

        if config.validation.sample_tokens:
            self.say("sample:\n" + self.sample())
        metrics.close()

    def train_step(self) -> tuple[Tensor, float]:
        """One optimizer step: this rank's mean loss and the learning rate."""
        lr = self.set_hyperparameters()
        batch = self.loader.step()
        if self.optimizer.exact:  # the next batch's gradient at these weights corrects the next step
            self.backward(self.loader.peek())
            self.optimizer.look_ahead()
            self.optimizer.zero_grad()
        loss = self.backward(batch)
        with self.stopwatch:
            self.optimizer.step()
        self.optimizer.zero_grad()
        return loss, lr

    def backward(self, batch: list[Tensor]) -> Tensor:
        """Accumulate the gradient of the mean loss over a global batch, of which `batch` are this rank's microbatches; this rank's loss."""
        loss = torch.zeros((), device=self.layout.device)
        for microbatch, tokens in enumerate(batch, start=1):
            reduce_gradients(self.model, last=microbatch == self.accumulation_steps)
            # All microbatches are of one size, so the mean of their means is the mean over the global batch's tokens.
            part = self.token_losses(tokens).mean() / self.accumulation_steps
            part.backward()
            loss += part.detach()
        return loss

    def refuse_to_go_on_skipping(self, told: dict[str, float]) -> None:
        """Raise `UserError` once every one of the last steps was skipped for a gradient that is not finite."""
        if told["skipped_in_a_row"] >= MAX_SKIPPED_IN_A_ROW:
            raise UserError(f"the last {told['skipped_in_a_row']:.0f} steps up to {self.step} were skipped, since their gradients were not finite: "
                            f"lower optimizer.lr, or go on from the newest checkpoint with another setting")

    def set_hyperparameters(self) -> float:
        """Set every group's learning rate and gamma for the step to come; returns the matrices' learning rate."""
        schedule, base, total = self.config.schedule, self.config.optimizer.lr, self.config.training.steps
        factor = lr_factor(self.step + 1, total, name=schedule.name, floor=schedule.min_lr / base,
                           warmup_steps=schedule.warmup_steps, decay_steps=schedule.decay_steps)
        for group, base_lr, gamma in zip(self.optimizer.param_groups, self.base_lrs, self.base_gammas):
            group["lr"] = base_lr * factor
            if schedule.final_gamma is not None:
                group["gamma"], group["gamma_next"] = (between(step, total, gamma, schedule.final_gamma, schedule.gamma)
                                                       for step in (self.step + 1, self.step + 2))
        return base * factor

    def token_losses(self, tokens: Tensor) -> Tensor:
        """The cross-entropy of each target in windows [batch, T + 1]: float32 [batch, T]."""
        tokens = tokens.to(self.layout.device, non_blocking=True)
        logits = self.model(tokens[:, :-1])
        targets = tokens[:, 1:]
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)

    @torch.no_grad()
    def validate(self) -> float:
        """The mean loss over the validation windows, the same ones on every layout."""
        total = torch.zeros(2, dtype=torch.float64, device=self.layout.device)  # sum of losses, targets
        for tokens, count in validation_batches(self.validation_windows, self.config.validation.windows,
                                                self.microbatch_size, self.layout.rank, self.layout.size):
            losses = self.token_losses(tokens)[:count]
            total += torch.tensor([losses.double().sum(), losses.numel()], device=total.device)
        mean_sum, mean_count = (self.layout.mean(part) for part in total)
        return mean_sum / mean_count

    def save(self) -> Path:
        """Write a checkpoint of the step just made."""
        meta = checkpoint.Meta(step=self.step, position=self.loader.position, world_size=self.layout.size, data=self.data,
                               vocab_size=self.manifest.vocab_size, optimizer=checkpoint.optimizer_state_names(self.optimizer),
                               config=asdict(self.config))
        return checkpoint.save(self.config, self.layout, self.model, self.optimizer, meta)

    def sample(self) -> str:
        """A text by the model as it is now. Every rank takes part."""
        with torch.compiler.set_stance("force_eager"):  # every length of context would be compiled anew
            return sample_text(self.model, TOKENIZERS[self.config.data.tokenizer](), self.config.validation.sample_prompt,
                               self.config.validation.sample_tokens, temperature=0.8, device=self.layout.device)

    def write_resolved_config(self) -> None:
        """Leave the settings that this run has in its folder, as a config that reproduces it."""
        folder = checkpoint.run_folder(self.config)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_config(self.config, folder / "config.toml")
        except OSError as error:
            raise UserError(f"cannot write to {folder}: {error.strerror}: set run.folder to a folder you can write") from None

    def announce(self) -> None:
        """Say what this run is about to do."""
        config, training, args = self.config, self.config.training, self.model.args
        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        tokens = self.manifest.splits["train"].tokens
        per_step = training.global_batch_size * training.seq_len
        self.say(f"run       {checkpoint.run_folder(config)}, seed {config.run.seed}")
        self.say(f"model     {config.model.name} {config.model.size}: {parameters:,} parameters, {args.n_layer} layers, {args.n_head} "
                 f"heads, width {args.n_embd}, vocabulary {args.vocab_size}")
        self.say(f"layout    {self.layout.describe()}, {str(self.compute_dtype()).removeprefix('torch.')} compute")
        self.say(f"batch     {training.global_batch_size} x {training.seq_len} tokens a step: {self.layout.size} ranks x "
                 f"{self.accumulation_steps} accumulation steps x {self.microbatch_size} sequences")
        self.say(f"optimizer {config.optimizer.name}, {config.optimizer.mode}")
        for line in group_table(self.optimizer.param_groups):
            self.say(f"          {line}")
        self.say(f"data      {config.data.path}: {tokens:,} {self.manifest.tokenizer} tokens; {training.steps} steps read "
                 f"{training.steps * per_step:,} ({training.steps * per_step / tokens:.2f} epochs)")
        if self.step >= training.steps:
            self.say(f"complete  all {training.steps} steps are done: {self.resumed_from}. "
                     f"To go on: --training.steps {self.step + training.steps}")
        elif self.resumed_from:
            self.say(f"continue  from step {self.step}: {self.resumed_from}")

    def say(self, text: str) -> None:
        if self.layout.first:
            print(text, flush=True)


def due(step: int, interval: int, last: int) -> bool:
    """Whether something done every `interval` steps (0: never) and after the last one is due after `step`."""
    return step == last or (interval > 0 and step % interval == 0)


def group_table(groups: list[dict]) -> list[str]:
    """The optimizer's groups as lines of a table: whose parameters, how many, under which rule and settings."""
    rows = [("group", "rule", "tensors", "parameters", "lr", "betas", "weight decay", "gamma", "clip")]
    for group in groups:
        mars = group["rule"].startswith("mars-")
        rows.append((group["role"], group["rule"], str(len(group["params"])), f"{sum(p.numel() for p in group['params']):,}", f"{group['lr']:g}",
                     " ".join(f"{beta:g}" for beta in group["betas"]), f"{group['weight_decay']:g}", f"{group['gamma']:g}" if mars else "-",
                     f"{group['clip'] or 'off'}" if mars else "-"))
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
