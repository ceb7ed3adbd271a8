"""The update of weights and state by every rule, while matrices travel."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from torchmars.optim.kernels import Tensors, run_kernel
from torchmars.optim.matrices.exchange import Exchange
from torchmars.optim.matrices.traffic import MatrixTile
from torchmars.optim.plans import Plans
from torchmars.optim.rules import RULES, ElementwiseRule, MatrixRule
from torchmars.optim.rules.correction import Corrections, corrected_gradient_, write_if
from torchmars.optim.rules.factors import factors_of_each
from torchmars.optim.rules.lean import (
    DirectionFactors,
    LeanFactors,
    lean_direction_,
    lean_factors,
    lean_momentum_,
)
from torchmars.optim.step import GroupTensors, StepFactors
from torchmars.optim.tensors import flat_slices


def update_groups(updates: Sequence[tuple[GroupTensors, StepFactors]], plans: Plans) -> None:
    """Update weights and state of all groups in place. Collective where matrices are sharded."""
    matrices = [
        MatrixUpdate(rule, group, factors)
        for group, factors in updates
        if isinstance(rule := RULES[group.rule], MatrixRule)
    ]
    exchange = Exchange(plans.traffic, matrices)

    for each in matrices:
        each.update_momenta()
    exchange.start()
    for group, factors in updates:  # while matrices travel
        if isinstance(rule := RULES[group.rule], ElementwiseRule):
            rule.update(group, factors)
    exchange.finish()
    for each in matrices:
        each.update_lean_momenta()


class MatrixUpdate:
    """The update of one group's matrices in one step, as an exchange reads and writes it."""

    def __init__(self, rule: MatrixRule, group: GroupTensors, step: StepFactors) -> None:
        self.rule, self.group, self.step = rule, group, step
        self.parameters = group.parameters
        self.lean: LeanFactors | None = None
        if step.corrections is None:
            self.lean = lean_factors(group, step, rule.lean_form(group.settings))
        self.lr = group.scalar(group.settings["lr"]) * step.applied
        self.keep = 1 - self.lr * group.scalar(group.settings["weight_decay"])

    def update_momenta(self) -> None:
        """Update momenta, except lean ones: their direction is made of the old buffer."""
        if self.lean is not None:
            return
        rate = self.group.scalar(1 - self.group.settings["betas"][0])
        tensors = list(zip(self.group.momenta, self.group.grads, self.group.last_grads))
        self.step.run(mars_momentum_, tensors, (self.step.corrections, rate))
        self.step.keep_gradients(self.group)

    def read(self, tiles: Sequence[MatrixTile]) -> None:
        """Write the matrices to orthogonalise to the values of each tile."""
        values, momenta = [tile.values for tile in tiles], _of_tiles(self.group.momenta, tiles)
        if self.lean is None:
            torch._foreach_copy_(values, momenta)
            return
        outs = self.lean.out.unbind()
        factors = DirectionFactors(
            self.lean.scale,
            self.lean.applied,
            self.lean.mix,
            torch.stack([outs[tile.number] for tile in tiles]),
        )
        grads = _of_tiles(self.group.grads, tiles)
        self._run_on_tiles(lean_direction_, list(zip(values, momenta, grads)), factors)

    def apply(self, tiles: Sequence[MatrixTile]) -> None:
        """Step along an orthogonalised direction, the values of each tile."""
        shapes = [each.tile.units.shape for each in tiles]
        lr_of = {shape: self.lr * self.rule.scale(*shape) for shape in set(shapes)}
        lr = torch.stack([lr_of[shape] for shape in shapes])
        weights, directions = _of_tiles(self.group.weights, tiles), [tile.values for tile in tiles]
        self._run_on_tiles(step_along_, list(zip(weights, directions)), (lr, self.keep))

    def _run_on_tiles(self, kernel: Callable, tensors: Tensors, factors: tuple) -> None:
        """Run `kernel`: on CPUs not compiled, since it would round otherwise and save little."""
        on_gpu = self.group.weights[0].device.type != "cpu"
        run_kernel(kernel, tensors, factors, compile=self.step.compile and on_gpu)

    def update_lean_momenta(self) -> None:
        """Update lean momenta, whose old values the directions were made of."""
        if self.lean is not None:
            tensors = list(zip(self.group.momenta, self.group.grads))
            self.step.run(lean_momentum_, tensors, self.lean)


def _of_tiles(tensors: Sequence[Tensor], tiles: Sequence[MatrixTile]) -> list[Tensor]:
    """Return each tile of `tensors`, the flat ones of a group."""
    return flat_slices((tensors[each.number], each.tile.start, each.tile.numel) for each in tiles)


def mars_momentum_(tensors: Tensors, factors: tuple[Corrections, Tensor]) -> None:
    """Update the first moment of the corrected gradient on each (m, g, h), in place.

    The second factor is one minus beta1.
    """
    for (m, g, h), (correction, rate) in zip(tensors, factors_of_each(factors, len(tensors))):
        c = corrected_gradient_(g, h, correction)
        write_if(correction.applied, m, m + rate * (c - m))


def step_along_(tensors: Tensors, factors: tuple[Tensor, Tensor]) -> None:
    """Step along the direction d on each (x, d), in place: x <- keep x - lr d.

    The factors are lr and keep. A bfloat16 x is rounded once.
    """
    for (x, d), (lr, keep) in zip(tensors, factors_of_each(factors, len(tensors))):
        x.copy_(x.to(keep.dtype).mul_(keep).addcmul_(d.to(keep.dtype), lr, value=-1))
