"""Train many small GPT-2s at once on one device, as one batch of models that share nothing.

A trial of docs/comparing.md's size leaves a GPU idle for most of a step. Here a tensor has a first
dim of trials, [n, ...], so that sixty cost little more than one. Groups, initial weights, order of
the data and schedules are the package's own. The model and the rules are written again, for
[n, ...] in float32, from `optim/reference.py`: `test_trials_together.py` holds both together.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from torchmars.config import ResolvedConfig
from torchmars.data.order import window_of_sample
from torchmars.models import build_meta_model
from torchmars.models.gpt2 import GPT2
from torchmars.models.initialize import init_weights
from torchmars.optim import between, lr_factor, param_groups
from torchmars.optim.matrices.directions import Directions
from torchmars.optim.rules import RULES, MatrixRule

WIRE = torch.bfloat16  # what momenta are rounded to and multiplied in: `matrix_dtype = "bfloat16"`


@dataclass(frozen=True)
class Text:
    """The two splits of a corpus of bytes, uint8."""

    train: Tensor
    validation: Tensor
    vocab_size: int

    def windows(self, split: Tensor, numbers: Tensor, length: int) -> Tensor:
        """Return windows [..., length + 1] of a split by their `numbers` [...]."""
        places = numbers[..., None] * length + torch.arange(length + 1, device=split.device)
        return split[places].long()


def train_together(
    configs: Sequence[ResolvedConfig], text: Text, device: torch.device
) -> list[list[tuple[int, float]]]:
    """Train one model for each config; return the validation losses of each, by step.

    The configs may differ in [optimizer], run.seed and schedule.final_gamma alone.
    """
    training, validation = configs[0].training, configs[0].validation
    trials = Trials(configs, text.vocab_size, device)
    order = reading_order(configs, len(text.train), device)
    found: list[list[tuple[int, float]]] = [[] for _ in configs]
    for step in range(1, training.steps + 1):
        tokens = text.windows(text.train, order[:, step - 1], training.seq_len)
        trials.step(tokens, step)
        if step % validation.interval == 0 or step == training.steps:
            for curve, loss in zip(found, trials.validate(text).tolist()):
                curve.append((step, loss))
    return found


def reading_order(configs: Sequence[ResolvedConfig], tokens: int, device: torch.device) -> Tensor:
    """Return the windows that each trial reads, [n, steps, batch]."""
    training = configs[0].training
    windows = (tokens - 1) // training.seq_len
    samples = range(training.steps * training.global_batch_size)
    of_seed = {
        seed: np.array([window_of_sample(each, windows, seed) for each in samples])
        for seed in {config.run.seed for config in configs}
    }
    shape = training.steps, training.global_batch_size
    stacked = np.stack([of_seed[config.run.seed].reshape(shape) for config in configs])
    return torch.from_numpy(stacked).to(device)


class Trials:
    """Models [n, ...] and their optimizers."""

    def __init__(
        self, configs: Sequence[ResolvedConfig], vocab_size: int, device: torch.device
    ) -> None:
        self.configs, self.device = configs, device
        model = build_meta_model(configs[0].model, vocab_size, configs[0].training.seq_len)
        assert isinstance(model, GPT2)
        self.args = model.args
        self.weights = self._initial_weights(vocab_size)
        self.updates = list(self._updates(vocab_size))
        self.max_norm = configs[0].training.max_grad_norm
        # What the schedule makes of lr and gamma, [steps, n].
        steps = range(1, configs[0].training.steps + 1)
        self.lr_factors = self._table([[lr_at(each, step) for each in configs] for step in steps])
        self.gammas = self._table([[gamma_at(each, step) for each in configs] for step in steps])

    def _table(self, rows: list[list[float]]) -> Tensor:
        return torch.tensor(rows, dtype=torch.float64).to(self.device)

    def _initial_weights(self, vocab_size: int) -> dict[str, Tensor]:
        first = self.configs[0]
        of_seed = {}
        for seed in {config.run.seed for config in self.configs}:
            model = build_meta_model(first.model, vocab_size, first.training.seq_len)
            model.to_empty(device="cpu")
            init_weights(model, seed)
            of_seed[seed] = dict(model.named_parameters())
        return {
            name: torch.stack([of_seed[each.run.seed][name].detach() for each in self.configs])
            .to(self.device)
            .requires_grad_()
            for name in next(iter(of_seed.values()))
        }

    def _updates(self, vocab_size: int) -> Iterator["Update"]:
        """Yield an update for each parameter and each run of trials that treat it alike."""
        first = self.configs[0]
        model = build_meta_model(first.model, vocab_size, first.training.seq_len)
        settings_of: list[dict[str, dict[str, Any]]] = []
        for config in self.configs:
            given = config.optimizer.settings() | {"split_fused": False}
            groups = param_groups(model, **given)
            settings_of.append({name: group for group in groups for name, _ in group["params"]})
        for name, weight in self.weights.items():
            settings = [each[name] for each in settings_of]
            kinds = [kind_of(each) for each in settings]
            runs = itertools.groupby(range(len(settings)), kinds.__getitem__)
            for _, run in runs:
                numbers = list(run)
                part = slice(numbers[0], numbers[-1] + 1)
                yield Update(name, part, weight[part], settings[part])

    def step(self, tokens: Tensor, step: int) -> None:
        """Make step number `step` of all trials on `tokens` [n, batch, length + 1]."""
        loss = self.losses(tokens).sum()  # no trial has a part in another's gradient
        gradients = torch.autograd.grad(loss, list(self.weights.values()))
        with torch.no_grad():
            squares = [each.double().flatten(1).square().sum(1) for each in gradients]
            norms = torch.stack(squares).sum(0).sqrt()
            scale = (self.max_norm / (norms + 1e-6)).clamp(max=1.0).float()
            scaled = {
                name: gradient * column(scale, gradient)
                for name, gradient in zip(self.weights, gradients)
            }
            for update in self.updates:
                update.step(
                    self.weights[update.name][update.part],
                    scaled[update.name][update.part],
                    step,
                    self.lr_factors[step - 1][update.part],
                    self.gammas[step - 1][update.part],
                )

    def losses(self, tokens: Tensor) -> Tensor:
        """Return the mean loss of each trial, [n], on `tokens` [n, batch, length + 1]."""
        logits = self.logits(tokens[..., :-1])
        targets = tokens[..., 1:].flatten()
        return (
            F.cross_entropy(logits.flatten(0, -2), targets, reduction="none")
            .view(len(tokens), -1)
            .mean(1)
        )

    def logits(self, tokens: Tensor) -> Tensor:
        """Return the logits [n, batch x length, vocabulary] of `tokens` [n, batch, length]."""
        weights, args = self.weights, self.args
        trials, batch, length = tokens.shape
        table = weights["tok_embed.weight"]
        first_rows = torch.arange(trials, device=tokens.device)[:, None, None] * table.shape[1]
        x = F.embedding(tokens + first_rows, table.flatten(0, 1))
        x = (x + weights["pos_embed.weight"][:, None, :length]).flatten(1, 2)

        def norm(x: Tensor, name: str) -> Tensor:
            return F.layer_norm(x, x.shape[-1:]) * weights[f"{name}.weight"][:, None]

        def linear(x: Tensor, name: str) -> Tensor:
            return x @ weights[f"{name}.weight"].mT

        for number in range(args.n_layer):
            block = f"blocks.{number}"
            q, k, v = (
                each.reshape(trials * batch, length, args.n_head, -1).transpose(1, 2)
                for each in linear(norm(x, f"{block}.attn_norm"), f"{block}.attn.qkv").chunk(3, -1)
            )
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            mixed = mixed.transpose(1, 2).reshape(x.shape)
            x = x + linear(mixed, f"{block}.attn.proj")
            inner = F.gelu(linear(norm(x, f"{block}.mlp_norm"), f"{block}.mlp.up"))
            x = x + linear(inner, f"{block}.mlp.proj")
        return norm(x, "norm") @ table.mT

    @torch.no_grad()
    def validate(self, text: Text) -> Tensor:
        """Return the loss of each trial, [n], over the windows that a run validates on."""
        training = self.configs[0].training
        available = (len(text.validation) - 1) // training.seq_len
        count = min(self.configs[0].validation.windows, available)
        chosen = torch.arange(count, device=self.device) * available // count
        losses = []
        for numbers in chosen.split(training.global_batch_size):
            tokens = text.windows(text.validation, numbers, training.seq_len)
            mean = self.losses(tokens.expand(len(self.configs), -1, -1)).double()
            losses.append(mean * len(numbers))
        return torch.stack(losses).sum(0) / count


class Update:
    """One parameter's update in a run of trials that differ in numbers only."""

    def __init__(
        self, name: str, part: slice, weight: Tensor, settings: list[dict[str, Any]]
    ) -> None:
        self.name, self.part = name, part
        self.rule = settings[0]["rule"]
        self.state = {key: torch.zeros_like(weight) for key in ("m", "v", "h")}
        if isinstance(RULES[self.rule], MatrixRule):
            full = RULES[self.rule].defaults | settings[0]
            self.directions = Directions.of(full)

        def numbers(values: list[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float64, device=weight.device)

        self.lr, self.decay = (
            numbers([each[key] for each in settings]) for key in ("lr", "weight_decay")
        )
        self.beta1, self.beta2 = numbers([each["betas"] for each in settings]).unbind(1)
        self.eps = numbers([each.get("eps", 0.0) for each in settings])
        self.clip = numbers([each.get("clip") or math.inf for each in settings])

    def step(self, x: Tensor, g: Tensor, step: int, factor: Tensor, gamma: Tensor) -> None:
        """Make a step in place. `factor` of the learning rate and `gamma` are [n]."""

        def columns(values: Tensor) -> Tensor:
            return column(values.float(), x)

        beta1, rest = columns(self.beta1), columns(1 - self.beta1)
        m, v, h = self.state.values()
        if RULES[self.rule].variance_reduced:
            kappa = columns(gamma * self.beta1 / (1 - self.beta1))
            c = g + kappa * (g - (g if step == 1 else h))
            h.copy_(g)
            norms = torch.linalg.vector_norm(c.flatten(1), dim=1)
            g = c * column((self.clip.float() / norms).clamp(max=1.0), x)
        if self.rule == "muon":
            m.mul_(beta1).add_(g)
            direction = self.orthogonal(rest * (g + beta1 * m))
        else:
            m.mul_(beta1).add_(rest * g)
            if isinstance(RULES[self.rule], MatrixRule):
                direction = self.orthogonal(m)
            else:
                v.mul_(columns(self.beta2)).add_(columns(1 - self.beta2) * g * g)
                root = (v / columns(1 - self.beta2**step)).sqrt() + columns(self.eps)
                direction = m / columns(1 - self.beta1**step) / root
        lr = columns(self.lr * factor)
        x.sub_(lr * (direction + columns(self.decay) * x))

    def orthogonal(self, momenta: Tensor) -> Tensor:
        """Return the direction of matrices [n, rows, cols], with the scale of their rule."""
        shape = momenta.shape[1:]
        made = self.directions.orthogonalized(momenta.to(WIRE), WIRE, WIRE)
        rule = RULES[self.rule]
        assert isinstance(rule, MatrixRule)
        return self.directions.scaled(made, shape).to(WIRE).float() * rule.scale(*shape)


def kind_of(settings: dict[str, Any]) -> tuple[Any, ...]:
    """Return what trials that share an update have in common: all of a rule but its numbers."""
    rule, names = settings["rule"], ("equilibrate", "renormalize", "orthogonalize")
    assert rule in ("adamw", "mars-adamw", "muon", "mars-m", "mars-shampoo"), rule
    assert not any(settings.get(each) for each in ("cautious_decay", "normalize_rows"))
    return rule, *(settings.get(each) for each in names)


def column(values: Tensor, like: Tensor) -> Tensor:
    """Return `values` [n] as [n, 1, ...], to be multiplied with `like` [n, ...]."""
    return values.view(-1, *[1] * (like.ndim - 1))


def lr_at(config: ResolvedConfig, step: int) -> float:
    """Return the factor of a config's learning rates at a step."""
    schedule = config.schedule
    return lr_factor(
        step,
        config.training.steps,
        name=schedule.name,
        floor=schedule.min_lr / config.optimizer.lr,
        warmup_steps=schedule.warmup_steps,
        decay_steps=schedule.decay_steps,
    )


def gamma_at(config: ResolvedConfig, step: int) -> float:
    """Return a config's gamma at a step; 0 where its rule has none."""
    first, schedule = config.optimizer.settings().get("gamma") or 0.0, config.schedule
    if schedule.final_gamma is None:
        return float(first)
    return between(step, config.training.steps, first, schedule.final_gamma, schedule.gamma)
