"""A momentum that needs one buffer beside the gradient: Lion, Muon, unclipped MARS.

Where only the momentum is used and nothing is clipped tensor by tensor, the last gradient drops out
of MARS's momentum: see `mars_lean_form`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from torchmars.optim.rules.correction import write_if
from torchmars.optim.rules.factors import factors_of_each
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

    `settings` belong to a group.

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
    """The factors of kernels of a lean momentum: 0-d tensors in the computation's dtype, or [n]."""

    scale: Tensor
    """The factor of the global clip."""
    applied: Tensor
    """`StepFactors.applied`."""
    lr: Tensor
    weight_decay: Tensor
    mix: Tensor
    decay: Tensor
    out: Tensor
    """[n], like `weight`: a first step has others."""
    weight: Tensor


def lean_factors(group: GroupTensors, step: StepFactors, form: LeanForm) -> LeanFactors:
    """Return the factors of the tensors of `group`."""
    settings, first_step = group.settings, (step.steps_made == 0).double()
    return LeanFactors(
        scale=step.scale,
        applied=step.applied,
        lr=group.scalar(settings["lr"]),
        weight_decay=group.scalar(settings["weight_decay"]),
        mix=group.scalar(form.mix),
        decay=group.scalar(form.decay),
        out=(form.out + form.first * first_step).to(group.dtype),
        weight=(form.weight + form.first * first_step).to(group.dtype),
    )


class DirectionFactors(NamedTuple):
    """The factors of `lean_direction_`: `LeanFactors` for each tile."""

    scale: Tensor
    applied: Tensor
    mix: Tensor
    out: Tensor


def lean_direction_(tensors: Tensors, factors: DirectionFactors) -> None:
    """Write mix u + out g to the target of each (target, u, g), in the target's dtype."""
    for (target, u, g), f in zip(tensors, factors_of_each(factors, len(tensors))):
        used = f.scale * g.where(f.applied, 0).to(f.scale.dtype)
        target.copy_(f.mix * u.to(f.scale.dtype) + f.out * used)


def lean_momentum_(tensors: Tensors, factors: LeanFactors) -> None:
    """Set u <- decay u + weight g on each (u, g), in place."""
    for (u, g), f in zip(tensors, factors_of_each(factors, len(tensors))):
        used = g.to(f.scale.dtype) * f.scale
        write_if(f.applied, u, f.decay * u.to(f.scale.dtype) + f.weight * used)
