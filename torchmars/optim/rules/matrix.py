"""The rules that orthogonalise whole matrices: Muon, and MARS-M and MARS-Shampoo.

A sharded matrix travels to the rank that owns it and back (`exchange.py`). So a step has three
parts: a pass before, the directions of the matrices, and a pass after.
"""

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchmars.optim.exchange import MatrixTraffic
from torchmars.optim.matrices import MatrixShape
from torchmars.optim.passes import Tensors, run_pass, write_if
from torchmars.optim.pieces import Piece, Slices
from torchmars.optim.rules.correction import TensorCorrection, corrected_gradient
from torchmars.optim.rules.lean import (
    LeanFactors,
    LeanForm,
    lean_factors,
    lean_momentum_,
    mars_lean_form,
)
from torchmars.optim.rules.rule import GroupTensors, Rule, Settings, State, StepFactors
from torchmars.optim.rules.shared_settings import (
    MARS_DEFAULTS,
    adamw_settings,
    mars_settings_by_role,
)
from torchmars.optim.tensors import local_part


class MatrixRule(Rule):
    """A rule that steps along an orthogonalised momentum: x <- x - lr (scale NS(m) + decay x)."""

    @abstractmethod
    def scale(self, rows: int, cols: int) -> float:
        """Return what an orthogonalised [rows, cols] matrix is multiplied by."""

    @abstractmethod
    def lean_form(self, settings: Settings) -> LeanForm:
        """Return the coefficients of the momentum where no last gradient is kept."""

    def limits(self, group: GroupTensors, wire: torch.dtype) -> list[float]:
        # A matrix travels as it is, and is divided by its norm where it arrives.
        wide = torch.promote_types(wire, torch.float32)
        return [
            *super().limits(group, wire),
            torch.finfo(wire).max / 2,
            math.sqrt(torch.finfo(wide).max / 2),
        ]


def moonlight_scale(rows: int, cols: int) -> float:
    """Return 0.2 max(rows, cols)^(1/2): a step is as large as AdamW's (arXiv 2502.16982)."""
    return 0.2 * max(rows, cols) ** 0.5


class Muon(MatrixRule):
    """Muon with Nesterov momentum in Moonlight's form (Liu et al., arXiv 2502.16982).

    The buffer u is B, with B_t = mu B_{t-1} + g_t, and the direction is that of g_t + mu B_t, here
    times 1 - mu, so that it is of the gradient's size.
    """

    name = "muon"
    defaults = {
        "lr": 6e-3,
        "betas": (0.95, 0.99),
        "eps": 1e-8,
        "weight_decay": 0.1,
        "betas_1d": (0.9, 0.95),
    }
    former_names = {"momentum": "momentum_buffer"}

    def buffers(self, clip: float | None, exact: bool) -> tuple[str, ...]:
        return ("momentum_buffer",)

    def settings_by_role(self, main: Settings, settings: Settings) -> dict[str, Settings]:
        return adamw_but_for_matrices(settings)

    def scale(self, rows: int, cols: int) -> float:
        return moonlight_scale(rows, cols)

    def lean_form(self, settings: Settings) -> LeanForm:
        mu, _ = settings["betas"]
        return LeanForm(mix=(1 - mu) * mu**2, out=(1 - mu) * (1 + mu), decay=mu, weight=1.0)

    def limits(self, group: GroupTensors, wire: torch.dtype) -> list[float]:
        of_buffer, *others = super().limits(group, wire)
        # The buffer is a sum of gradients, as large as 1 / (1 - mu) of them.
        sums = 1 / (1 - group.settings["betas"][0])
        return [of_buffer / sums, *others]

    def squared_memory(self, state: State, rate1: float) -> Tensor:
        norm = torch.linalg.vector_norm(local_part(state["momentum_buffer"]), dtype=torch.float64)
        return (rate1 * norm).square()  # the rate makes the sum of gradients their average

    def former_scale(self, betas: Sequence[float]) -> float:
        mu, _ = betas
        return mu * (1 - mu)


class MarsM(MatrixRule):
    """Muon on the corrected momentum: MARS-M (Liu et al., arXiv 2510.21800)."""

    name = "mars-m"
    defaults = {
        "lr": 6e-3,
        "betas": (0.95, 0.99),
        "weight_decay": 0.1,
        "eps": 1e-8,
        "gamma": 0.025,
        "clip": 1.0,
        "betas_1d": (0.9, 0.95),
    }
    corrected = True

    def buffers(self, clip: float | None, exact: bool) -> tuple[str, ...]:
        return ("momentum",) if clip is None and not exact else ("exp_avg", "last_grad")

    def settings_by_role(self, main: Settings, settings: Settings) -> dict[str, Settings]:
        return adamw_but_for_matrices(settings)

    def scale(self, rows: int, cols: int) -> float:
        return moonlight_scale(rows, cols)

    def lean_form(self, settings: Settings) -> LeanForm:
        return mars_lean_form(settings)


class MarsShampoo(MarsM):
    """MARS-Shampoo (arXiv 2411.10438), with the scale of the published code."""

    name = "mars-shampoo"
    defaults = (
        {"lr": 2e-2, "betas": (0.95, 0.99), "weight_decay": 0.01} | MARS_DEFAULTS | {"lr_1d": 3e-3}
    )
    # Of the matrices' lr: an orthogonal matrix moves its entries less than AdamW does.
    EMBEDDING_LR = 0.3

    def settings_by_role(self, main: Settings, settings: Settings) -> dict[str, Settings]:
        outer = main | {"rule": "mars-adamw", "lr": settings["lr"] * self.EMBEDDING_LR}
        return mars_settings_by_role(outer, settings)

    def scale(self, rows: int, cols: int) -> float:
        return max(1.0, rows / cols) ** 0.5


def adamw_but_for_matrices(settings: Settings) -> dict[str, Settings]:
    """Return the settings of embeddings, heads and vectors that take AdamW at the matrices' lr."""
    adamw = adamw_settings(settings, settings["lr"], settings["betas_1d"], settings["weight_decay"])
    return dict.fromkeys(("embedding", "head", "vector"), adamw)


class MomentumFactors(NamedTuple):
    """The factors of one tensor's pass: 0-d tensors in the computation's dtype."""

    correction: TensorCorrection
    ok: Tensor
    """`StepFactors.ok`."""
    rate: Tensor
    """One minus beta1."""
    keep: bool
    """Whether the gradient just used becomes the last gradient."""


def mars_momentum_(tensors: Tensors, factors: Sequence[MomentumFactors]) -> None:
    """Update the first moment of the corrected gradient on each (m, g, h), in place."""
    for (m, g, h), f in zip(tensors, factors):
        used, c = corrected_gradient(g, h, f.correction)
        write_if(f.ok, m, m + f.rate * (c - m))
        if f.keep:
            write_if(f.ok, h, used)


class MatrixUpdate:
    """The update of one group's matrices in one step."""

    def __init__(self, rule: MatrixRule, group: GroupTensors, step: StepFactors) -> None:
        self.rule, self.group, self.step = rule, group, step
        name = next(name for name in group.buffers if name != "last_grad")
        self.momenta = group.buffers[name]
        self.lean: list[LeanFactors] | None = None
        if step.corrections is None:
            self.lean = lean_factors(group, step, rule.lean_form(group.settings))
        self.lr = group.scalar(group.settings["lr"]) * step.ok
        self.keep = 1 - self.lr * group.scalar(group.settings["weight_decay"])

    def before_directions(self) -> None:
        """Update the momentum, unless it is lean: its direction is made of the old buffer."""
        if self.step.corrections is None:
            return
        rate = self.group.scalar(1 - self.group.settings["betas"][0])
        factors = [
            MomentumFactors(correction, self.step.ok, rate, self.step.keep_gradient)
            for correction in self.step.correction_of_each()
        ]
        tensors = list(zip(self.momenta, self.group.grads, self.group.last_grads))
        run_pass(mars_momentum_, tensors, factors, self.step.compile)
        self.step.keep_gradients(self.group)

    def after_directions(self) -> None:
        """Update a lean momentum."""
        if self.lean is not None:
            tensors = list(zip(self.momenta, self.group.grads))
            run_pass(lean_momentum_, tensors, self.lean, self.step.compile)

    def direction_input(self, number: int, shape: MatrixShape, place: Slices) -> Tensor:
        """Return the part `place` of what is to be orthogonalised for parameter `number`.

        `place` is within the local [batch, rows, cols].
        """
        momentum = self._matrix(self.momenta[number], number, shape)[place]
        if self.lean is None:
            return momentum
        factors = self.lean[number]
        gradient = self._matrix(self.group.grads[number], number, shape)[place]
        used = factors.scale * torch.where(self.step.ok, gradient, 0).to(self.group.dtype)
        return factors.mix * momentum.to(self.group.dtype) + factors.out * used

    def apply_direction(
        self, number: int, shape: MatrixShape, piece: Piece, direction: Tensor
    ) -> None:
        """Step along an orthogonalised `direction` in a piece of parameter `number`."""
        lr = self.lr * self.rule.scale(piece.unit.rows, piece.unit.cols)
        x = self._matrix(self.group.weights[number], number, shape)[piece.local]
        # x itself, but for a bfloat16 parameter, which is rounded once.
        wide = x.to(self.group.dtype)
        x.copy_(wide.mul_(self.keep).addcmul_(direction.to(self.group.dtype), lr, value=-1))

    def _matrix(self, values: Tensor, number: int, shape: MatrixShape) -> Tensor:
        return values.view(shape.local(local_part(self.group.parameters[number]).shape))


class MatrixStep:
    """The matrices of all groups in one step: what the exchange reads from and writes to."""

    def __init__(self, updates: Sequence[MatrixUpdate]) -> None:
        self.updates = updates
        self._places = {
            parameter: (update, number)
            for update in updates
            for number, parameter in enumerate(update.group.parameters)
        }

    def before_directions(self) -> None:
        """Make the pass before the exchange."""
        for update in self.updates:
            update.before_directions()

    def after_directions(self) -> None:
        """Make the pass after the exchange."""
        for update in self.updates:
            update.after_directions()

    def read(self, traffic: MatrixTraffic, piece: Piece) -> Tensor:
        """Return the input [1, rows, cols] of a piece: zeros where a matrix has no gradient."""
        number = piece.unit.parameter
        if traffic.parameters[number] not in self._places:
            return traffic.zeros(piece)
        update, place = self._places[traffic.parameters[number]]
        return update.direction_input(place, traffic.shapes[number], piece.local)

    def write(self, traffic: MatrixTraffic, piece: Piece, direction: Tensor) -> None:
        """Step along the direction [1, rows, cols] of a piece, where a matrix has a gradient."""
        number = piece.unit.parameter
        if traffic.parameters[number] in self._places:
            update, place = self._places[traffic.parameters[number]]
            update.apply_direction(place, traffic.shapes[number], piece, direction)
