"""A momentum that needs one buffer beside the gradient: Lion, Muon, unclipped MARS.

Where only the momentum is used and nothing is clipped tensor by tensor, the last gradient drops out
of MARS's momentum: see `mars_lean_form`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from torchmars.optim.rules.correction import write_if
from torchmars.optim.settings import Settings

if TYPE_CHECKING:
    from torch import Tensor

    from torchmars.optim.kernels import Tensors
    from torchmars.optim.step import GroupTensors, StepFactors


class LeanForm(NamedTuple):
    """The coefficients of one step of a momentum that follows from one buffer u and the gradient g.

    The update takes the direction of mix u + out g, and then u <- decay u + weight g. At the first
    step `first` is added to `out` and to `weight`.
    """

    mix: float
    out: float
    decay: float
    weight: float
    first: float = 0.0


def mars_lean_form(settings: Settings) -> LeanForm:
    """Return the lean form of MARS in approximate mode, without a per-tensor clip.

    `settings` are those of a group.

    The momentum m_t = b m_{t-1} + (1 - b) g_t + gamma_t b (g_t - g_{t-1}) has g_{t-1} drop out
    exactly if u_t = m_t - gamma_{t+1} g_t. So a schedule of gamma needs the next step's value. It
    is exact whatever betas and gamma were before.
    """
    beta1, _ = settings["betas"]
    gamma, gamma_next = settings["gamma"], settings["gamma_next"]
    if gamma_next is None:
        gamma_next = gamma
    out = 1 - beta1 + gamma * beta1
    return LeanForm(mix=beta1, out=out, decay=beta1, weight=out - gamma_next, first=-gamma * beta1)


class LeanFactors(NamedTuple):
    """The factors of one tensor's pass: those of `LeanForm` and others, 0-d tensors."""

    scale: Tensor
    """The factor of the global clip."""
    applied: Tensor
    """`StepFactors.applied`."""
    lr: Tensor
    weight_decay: Tensor
    mix: Tensor
    out: Tensor
    decay: Tensor
    weight: Tensor


def lean_factors(group: GroupTensors, step: StepFactors, form: LeanForm) -> list[LeanFactors]:
    """Return the factors of each tensor of `group`."""
    lr, weight_decay = (group.scalar(group.settings[key]) for key in ("lr", "weight_decay"))
    mix, decay = group.scalar(form.mix), group.scalar(form.decay)
    first_step = (step.steps_made == 0).double()
    outs, weights = (
        (value + form.first * first_step).to(group.dtype).unbind()
        for value in (form.out, form.weight)
    )
    return [
        LeanFactors(step.scale, step.applied, lr, weight_decay, mix, out, decay, weight)
        for out, weight in zip(outs, weights)
    ]


def lean_momentum_(tensors: Tensors, factors: Sequence[LeanFactors]) -> None:
    """Set u <- decay u + weight g on each (u, g), in place."""
    for (u, g), f in zip(tensors, factors):
        write_if(f.applied, u, f.decay * u.to(f.scale.dtype) + f.weight * (g * f.scale))
