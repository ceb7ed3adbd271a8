"""AdamW, plain and on the corrected gradient of MARS."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, NamedTuple

from torchmars.optim.rules.by_role import mars_settings_by_role
from torchmars.optim.rules.correction import Corrections, corrected_gradient_, write_if
from torchmars.optim.rules.factors import factors_of_each
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


class AdamW(ElementwiseRule):
    """AdamW (Loshchilov & Hutter, arXiv 1711.05101), by torch's own fused kernel.

    That takes gradients and moments of the parameter's dtype. Others have a pass here.
    """

    name = "adamw"
    settings: ClassVar[Declared] = (
        LR.of(6e-4),
        BETAS.of((0.9, 0.95)),
        EPS,
        WEIGHT_DECAY.of(0.1),
    )
    counts_steps = True

    def buffers(self, clip: float | None, exact: bool) -> tuple[str, ...]:
        return "exp_avg", "exp_avg_sq"

    def update(self, group: GroupTensors, step: StepFactors) -> None:
        from torch.optim.adamw import adamw  # here, since no rule imports torch to be read

        beta1, beta2 = group.settings["betas"]
        first, second = group.buffers["exp_avg"], group.buffers["exp_avg_sq"]
        dtypes = {each[0].dtype for each in (group.weights, group.grads, first, second)}
        if len(dtypes) > 1:
            tensors = list(zip(group.weights, group.grads, first, second))
            step.run(adamw_, tensors, moment_factors(group, step))
            group.count_step(step.applied)
            return
        adamw(
            group.weights,
            group.grads,
            first,
            second,
            [],
            group.steps,
            fused=True,
            grad_scale=(1 / step.scale).float() if step.globally_clipped else None,
            found_inf=(~step.applied).float(),
            amsgrad=False,
            maximize=False,
            beta1=beta1,
            beta2=beta2,
            lr=group.settings["lr"],
            eps=group.settings["eps"],
            weight_decay=group.settings["weight_decay"],
        )


class MarsAdamW(AdamW):
    """AdamW's two moments of the corrected gradient.

    The second moment needs the last gradient, also without a clip.
    """

    name = "mars-adamw"
    settings = (
        LR.of(6e-3),
        BETAS.of((0.95, 0.99)),
        WEIGHT_DECAY.of(0.01),
        LR_1D,
        *MARS_SETTINGS,
    )
    variance_reduced = True
    continues = ("adamw",)
    counts_steps = False

    def buffers(self, clip: float | None, exact: bool) -> tuple[str, ...]:
        return "exp_avg", "exp_avg_sq", "last_grad"

    def settings_by_role(self, main: Settings, settings: Settings) -> dict[str, Settings]:
        return mars_settings_by_role(main, settings)

    def update(self, group: GroupTensors, step: StepFactors) -> None:
        moments = group.buffers["exp_avg"], group.buffers["exp_avg_sq"]
        tensors = list(zip(group.weights, group.grads, group.last_grads, *moments))
        step.run(mars_adamw_, tensors, (step.corrections, moment_factors(group, step)))
        step.keep_gradients(group)


class MomentFactors(NamedTuple):
    """Factors of an update by moments: 0-d tensors in the computation's dtype, or [n]."""

    scale: Tensor
    """The factor of the global clip."""
    applied: Tensor
    """`StepFactors.applied`."""
    lr: Tensor
    weight_decay: Tensor
    eps: Tensor
    rate1: Tensor
    """One minus beta1."""
    rate2: Tensor
    """One minus beta2."""
    unbias1: Tensor
    """The bias corrections of the first moment, 1 / (1 - beta1^t), [n]."""
    unbias2: Tensor
    """The bias corrections of the second moment, [n]."""


def moment_factors(group: GroupTensors, step: StepFactors) -> MomentFactors:
    """Return the factors of the tensors of `group`."""
    settings, (beta1, beta2) = group.settings, group.settings["betas"]

    def unbias(beta: float) -> Tensor:
        return (1 / (1 - beta ** (step.steps_made + 1))).to(group.dtype)

    return MomentFactors(
        scale=step.scale,
        applied=step.applied,
        lr=group.scalar(settings["lr"]),
        weight_decay=group.scalar(settings["weight_decay"]),
        eps=group.scalar(settings["eps"]),
        rate1=group.scalar(1 - beta1),
        rate2=group.scalar(1 - beta2),
        unbias1=unbias(beta1),
        unbias2=unbias(beta2),
    )


def mars_adamw_(tensors: Tensors, factors: tuple[Corrections, MomentFactors]) -> None:
    """Update each (p, g, h, m, v) in place."""
    for (p, g, h, m, v), (correction, f) in zip(tensors, factors_of_each(factors, len(tensors))):
        _step_by_moments(p, corrected_gradient_(g, h, correction), m, v, f)


def adamw_(tensors: Tensors, factors: MomentFactors) -> None:
    """Update each (p, g, m, v) in place."""
    for (p, g, m, v), f in zip(tensors, factors_of_each(factors, len(tensors))):
        _step_by_moments(p, g.to(f.scale.dtype) * f.scale, m, v, f)


def _step_by_moments(p: Tensor, c: Tensor, m: Tensor, v: Tensor, f: MomentFactors) -> None:
    """Update p, and m and v by the gradient c."""
    new_m, new_v = m + f.rate1 * (c - m), v + f.rate2 * (c * c - v)
    direction = new_m * f.unbias1 / ((new_v * f.unbias2).sqrt() + f.eps)
    x = p.to(c.dtype)
    write_if(f.applied, p, x - f.lr * (direction + f.weight_decay * x))
    write_if(f.applied, m, new_m)
    write_if(f.applied, v, new_v)
