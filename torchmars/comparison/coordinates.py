"""The sizes of what a model computes after a few steps, at several widths: do rates transfer?

Where they do, numbers are of the same size at every width, at each place of the model. Source: the
coordinate check of Yang et al. 2022 (arXiv 2203.03466, appendix D).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from torchmars.config import Config, ResolvedConfig
from torchmars.config.model import shape_fields
from torchmars.core.errors import UserError
from torchmars.models import Model, build_run_model
from torchmars.models.base import factors_of
from torchmars.models.initialize import init_weights
from torchmars.optim.roles import roles
from torchmars.training.optimizer import build_optimizer

C = TypeVar("C", bound=Config)

# The batch: of random tokens, the same at each step, since only its learning is looked at.
VOCABULARY, LENGTH, SEQUENCES = 64, 32, 8


def sized(config: C, width: int | None = None, depth: int | None = None) -> C:
    """Return a config whose model has another width, and so many blocks.

    With the width grow the settings that the family's `grows` names. Raises `UserError` where these
    are no whole numbers, and for a family that names none.
    """
    model = build_run_model(bare(config), VOCABULARY)
    changed: dict[str, Any] = {} if depth is None else {"n_layer": depth}
    if width is not None and width != model.width:
        if not model.settings.grows:
            raise UserError(
                f'model.name = "{config.model.name}" does not say what grows with its width: name '
                "those settings as grows of its settings"
            )
        growing = {name: getattr(model.args, name) or 0 for name in model.settings.grows}
        step = model.width // math.gcd(model.width, *growing.values())
        for name, value in growing.items():
            if value * width % model.width:
                times = width / model.width
                raise UserError(
                    f"width {width} is {times:g} times {model.width}, and so model.{name} = "
                    f"{value} would be {value * times:g}: choose multiples of {step}"
                )
            if value:
                changed[name] = value * width // model.width
    return replace(config, model=replace(config.model, **changed))


def bare(config: C) -> C:
    """Return a config without a base."""
    return replace(config, transfer=type(config.transfer)())


def based(config: C, base: Config) -> C:
    """Return a config whose [transfer] names the model of another config as the base."""
    model = build_run_model(bare(base), VOCABULARY)
    names = shape_fields(model.settings)
    shape: dict[str, Any] = {name: getattr(model.args, name) for name in names}
    return replace(config, transfer=replace(config.transfer, size=None, **shape))


def measured(config: ResolvedConfig, steps: int, seed: int = 0) -> dict[str, float]:
    """Return sizes, by place, of a config's model after some steps at optimizer.lr.

    These are roots of mean squares: in the last block of attention logits, of what its attention
    and its MLP compute and of the residual stream after it, and how far the state before the head
    and the logits have moved. And the norms of the first step's gradients, by role.
    """
    model = build_run_model(config, VOCABULARY).to_empty(device="cpu")
    factors = factors_of(model, config.transfer)
    init_weights(model, seed, None, None if factors is None else factors.std)
    optimizer = build_optimizer(config, model)
    optimizer.compile = False  # it takes longer than the steps
    generator = torch.Generator().manual_seed(seed)
    rows, length = min(VOCABULARY, model.vocab_rows), min(LENGTH, model.seq_len)
    tokens = torch.randint(rows, (SEQUENCES, length + 1), generator=generator)
    gradients: dict[str, float] = {}
    for step in range(steps):
        state = model(tokens[:, :-1])
        logits = model.head(state)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        if not step:
            first = state.detach(), logits.detach()
            for name, role in roles(model).items():
                place, gradient = f"gradient of {role}", model.get_parameter(name).grad
                norm = 0.0 if gradient is None else float(gradient.norm())
                gradients[place] = math.hypot(gradients.get(place, 0.0), norm)
        optimizer.step()
    return gradients | places(model, tokens[:, :-1], first)


@torch.no_grad()
def places(model: Model, tokens: Tensor, first: tuple[Tensor, Tensor]) -> dict[str, float]:
    """Return the sizes of what a model computes of `tokens`, by place.

    `first` are the state before the head and the logits, before the model was trained.
    """
    found: dict[str, float] = {}
    block = list(model.blocks.values())[-1]

    def keep(place: str) -> Any:
        return lambda module, inputs, output: found.update({place: rms(output)})

    def keep_logits(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        q, k = inputs[:2]
        scale: Any = module.scale or q.shape[-1] ** -0.5
        k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        found["attention logits"] = rms(q @ k.mT * scale)

    [attention, *_] = (each for each in model.attention() if each in set(block.modules()))
    hooks = [block.register_forward_hook(keep("residual stream"))]
    hooks += [getattr(block, name).register_forward_hook(keep(name)) for name in ("attn", "mlp")]
    hooks.append(attention.register_forward_pre_hook(keep_logits))
    state = model(tokens)
    found["change of state"] = rms(state - first[0])
    found["change of logits"] = rms(model.head(state) - first[1])
    for each in hooks:
        each.remove()
    return found


def rms(values: Tensor) -> float:
    """Return the root of the mean square."""
    return float(values.double().square().mean().sqrt())


def exponents(sizes: Mapping[int, Mapping[str, float]], along: str = "width") -> dict[str, float]:
    """Return of each place the power of the width, or of the depth, that its sizes go with.

    `sizes` are those of each width, as `measured` returns them. 0 means: the same at each width. It
    is by least squares, and NaN where a size is 0 or not finite.

    The change of logits falls with the width to what is learned: its square is c + k / width, where
    k is the initial head on the state that has moved, as on noise. The power at the largest width
    counts there: above -1/4 most of the square is c. Of examples/gemma3.py at widths of 64 to 512
    it is -0.14, where the slope over all of them is -0.25 (26-11-27).
    """
    numbers, found = np.array([*sizes], dtype=float), {}
    for place in next(iter(sizes.values())):
        values = np.array([each[place] for each in sizes.values()])
        if not all((values > 0) & np.isfinite(values)):
            found[place] = math.nan
            continue
        power = np.polyfit(np.log(numbers), np.log(values), 1)[0]
        if place == "change of logits" and along == "width":
            k, _ = np.polyfit(1 / numbers, values**2, 1, w=values**-2)
            power = max(power, -k / numbers[-1] / (2 * values[-1] ** 2))
        found[place] = float(power)
    return found


def coordinates(
    config: ResolvedConfig,
    numbers: Sequence[int],
    along: str = "width",
    steps: int = 4,
    without: bool = False,
) -> dict[int, dict[str, float]]:
    """Return the sizes, as of `measured`, at each width, or each number of blocks ("depth").

    The least of the `numbers` is the base, with the rest of [transfer] as the config has it.
    `without`: nothing is transferred. Raises `UserError`.
    """
    base = sized(config, **{along: min(numbers)})
    found = {}
    for number in sorted(numbers):
        large = sized(config, **{along: number})
        found[number] = measured(bare(large) if without else based(large, base), steps)
    return found
