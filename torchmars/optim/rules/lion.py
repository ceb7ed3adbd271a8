"""Lion, and the sign of the corrected momentum of MARS."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, NamedTuple

from torchmars.optim.rules.by_role import mars_settings_by_role
from torchmars.optim.rules.correction import Corrections, corrected_gradient_, write_if
from torchmars.optim.rules.factors import factors_of_each
from torchmars.optim.rules.lean import LeanFactors, LeanForm, lean_factors, mars_lean_form
from torchmars.optim.rules.rule import ElementwiseRule
from torchmars.optim.settings import (
    BETAS,
    EPS,
    LR,
    LR_1D,
    MARS_SETTINGS,
    WEIGHT_DECAY,
    Declared,
    Settings,
)

if TYPE_CHECKING:
    from torch import Tensor

    from torchmars.optim.kernels import Tensors
    from torchmars.optim.step import GroupTensors, StepFactors


class Lion(ElementwiseRule):
    """Lion (Chen et al., arXiv 2302.06675, algorithm 2). The buffer u is m, the average of g."""

    name = "lion"
    settings: ClassVar[Declared] = (
        LR.of(1e-4),
        BETAS.of((0.9, 0.99)),
        EPS,
        WEIGHT_DECAY.of(0.5),
    )

    def buffers(self, clip: float | None, exact: bool) -> tuple[str, ...]:
        return ("exp_avg",)

    def lean_form(self, settings: Settings) -> LeanForm:
        """Return the coefficients of the momentum where no last gradient is kept."""
        beta1, beta2 = settings["betas"]
        return LeanForm(mix=beta1, out=1 - beta1, decay=beta2, weight=1 - beta2)

    def update(self, group: GroupTensors, step: StepFactors) -> None:
        tensors = list(zip(group.weights, group.momenta, group.grads))
        step.run(lean_lion_, tensors, lean_factors(group, step, self.lean_form(group.settings)))


class MarsLion(Lion):
    """MARS-Lion (arXiv 2411.10438): a step by the sign of the corrected momentum."""

    name = "mars-lion"
    settings = (
        LR.of(6e-4),
        BETAS.of((0.95, 0.99)),
        WEIGHT_DECAY.of(0.1),
        LR_1D,
        *MARS_SETTINGS,
    )
    variance_reduced = True

    def buffers(self, clip: float | None, exact: bool) -> tuple[str, ...]:
        return ("momentum",) if clip is None and not exact else ("exp_avg", "last_grad")

    def settings_by_role(self, main: Settings, settings: Settings) -> dict[str, Settings]:
        return mars_settings_by_role(main, settings)

    def lean_form(self, settings: Settings) -> LeanForm:
        return mars_lean_form(settings)

    def update(self, group: GroupTensors, step: StepFactors) -> None:
        if step.corrections is None:
            super().update(group, step)
            return
        tensors = list(zip(group.weights, group.grads, group.last_grads, group.momenta))
        lr, weight_decay = (group.scalar(group.settings[key]) for key in ("lr", "weight_decay"))
        rate = group.scalar(1 - group.settings["betas"][0])
        factors = LionFactors(step.corrections, lr, weight_decay, rate)
        step.run(mars_lion_, tensors, factors)
        step.keep_gradients(group)


class LionFactors(NamedTuple):
    """The factors of `mars_lion_`: 0-d tensors in the computation's dtype, and the corrections."""

    correction: Corrections
    lr: Tensor
    weight_decay: Tensor
    rate: Tensor
    """One minus beta1."""

    @property
    def applied(self) -> Tensor:
        """`StepFactors.applied`."""
        return self.correction.applied


def mars_lion_(tensors: Tensors, factors: LionFactors) -> None:
    """Update each (p, g, h, m) in place: x <- x - lr (sign(m) + weight_decay x)."""
    for (p, g, h, m), f in zip(tensors, factors_of_each(factors, len(tensors))):
        new_m = m + f.rate * (corrected_gradient_(g, h, f.correction) - m)
        _step_by_sign(p, new_m, f)
        write_if(f.applied, m, new_m)


def lean_lion_(tensors: Tensors, factors: LeanFactors) -> None:
    """Update each (p, u, g) in place, by the sign of mix u + out g."""
    for (p, u, g), f in zip(tensors, factors_of_each(factors, len(tensors))):
        used, wide = g.to(f.scale.dtype) * f.scale, u.to(f.scale.dtype)
        _step_by_sign(p, f.mix * wide + f.out * used, f)
        write_if(f.applied, u, f.decay * wide + f.weight * used)


def _step_by_sign(p: Tensor, momentum: Tensor, f: LionFactors | LeanFactors) -> None:
    x, direction = p.to(momentum.dtype), momentum.sign()
    write_if(f.applied, p, x - f.lr * (direction + f.weight_decay * x))
