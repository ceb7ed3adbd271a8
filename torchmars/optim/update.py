"""The update of weights and state by every rule, while matrices travel."""

from collections.abc import Sequence

import torch
from torch import Tensor

from torchmars.optim.exchange import Exchange
from torchmars.optim.kernels import Tensors
from torchmars.optim.matrices import MatrixShape
from torchmars.optim.plans import Plans
from torchmars.optim.rules import ElementwiseRule, MatrixRule
from torchmars.optim.rules.correction import TensorCorrection, corrected_gradient, write_if
from torchmars.optim.rules.lean import LeanFactors, lean_factors, lean_momentum_
from torchmars.optim.step import GroupTensors, StepFactors
from torchmars.optim.tensors import local_part
from torchmars.optim.tiles import Slices, Tile


def update_groups(
    updates: Sequence[tuple[GroupTensors, StepFactors]], plans: Plans, *, overlap: bool
) -> None:
    """Update weights and state of all groups in place. Collective where matrices are sharded.

    `overlap` is that of `MARS`.
    """
    matrices = [
        MatrixUpdate(group.rule, group, factors)
        for group, factors in updates
        if isinstance(group.rule, MatrixRule)
    ]
    exchange = Exchange(plans.traffic, matrices, overlap=overlap)

    for each in matrices:
        each.update_momenta()
    exchange.start()
    for group, factors in updates:  # while matrices travel
        if isinstance(group.rule, ElementwiseRule):
            group.rule.update(group, factors)
    exchange.finish()
    for each in matrices:
        each.update_lean_momenta()


class MatrixUpdate:
    """The update of one group's matrices in one step: what an exchange reads and writes."""

    def __init__(self, rule: MatrixRule, group: GroupTensors, step: StepFactors) -> None:
        self.rule, self.group, self.step = rule, group, step
        self.parameters = group.parameters
        self.lean: list[LeanFactors] | None = None
        if step.corrections is None:
            self.lean = lean_factors(group, step, rule.lean_form(group.settings))
        self.lr = group.scalar(group.settings["lr"]) * step.applied
        self.keep = 1 - self.lr * group.scalar(group.settings["weight_decay"])

    def update_momenta(self) -> None:
        """Update momenta, but for lean ones: their direction is made of the old buffer."""
        if self.lean is not None:
            return
        rate = self.group.scalar(1 - self.group.settings["betas"][0])
        factors = [(correction, rate) for correction in self.step.correction_of_each()]
        tensors = list(zip(self.group.momenta, self.group.grads, self.group.last_grads))
        self.step.run(mars_momentum_, tensors, factors)
        self.step.keep_gradients(self.group)

    def direction_input(self, number: int, shape: MatrixShape, place: Slices) -> Tensor:
        """Return the part `place` of what is to be orthogonalised for parameter `number`.

        `place` is within the local [batch, rows, cols].
        """
        momentum = self._matrix(self.group.momenta[number], number, shape)[place]
        if self.lean is None:
            return momentum
        factors = self.lean[number]
        gradient = self._matrix(self.group.grads[number], number, shape)[place]
        used = factors.scale * torch.where(self.step.applied, gradient, 0).to(self.group.dtype)
        return factors.mix * momentum.to(self.group.dtype) + factors.out * used

    def apply_direction(
        self, number: int, shape: MatrixShape, tile: Tile, direction: Tensor
    ) -> None:
        """Step along an orthogonalised `direction` in a tile of parameter `number`."""
        lr = self.lr * self.rule.scale(tile.unit.rows, tile.unit.cols)
        x = self._matrix(self.group.weights[number], number, shape)[tile.local]
        # x itself, but for a bfloat16 parameter, which is rounded once.
        wide = x.to(self.group.dtype)
        x.copy_(wide.mul_(self.keep).addcmul_(direction.to(self.group.dtype), lr, value=-1))

    def update_lean_momenta(self) -> None:
        """Update lean momenta, whose old values the directions were made of."""
        if self.lean is not None:
            tensors = list(zip(self.group.momenta, self.group.grads))
            self.step.run(lean_momentum_, tensors, self.lean)

    def _matrix(self, values: Tensor, number: int, shape: MatrixShape) -> Tensor:
        return values.view(shape.local(local_part(self.parameters[number]).shape))


def mars_momentum_(tensors: Tensors, factors: Sequence[tuple[TensorCorrection, Tensor]]) -> None:
    """Update the first moment of the corrected gradient on each (m, g, h), in place.

    The second factor is one minus beta1.
    """
    for (m, g, h), (correction, rate) in zip(tensors, factors):
        used, c = corrected_gradient(g, h, correction)
        write_if(correction.applied, m, m + rate * (c - m))
        if correction.keep:
            write_if(correction.applied, h, used)
