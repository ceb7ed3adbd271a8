"""The arithmetic that the rules' kernels share: the corrected gradient, and writes on condition.

Sources: Yuan et al., "MARS", arXiv 2411.10438, equation 4.2; Liu et al., "MARS-M", arXiv
2510.21800.

Names: g gradient, h last gradient, s factor of the global clip, c corrected gradient.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


class Corrections(NamedTuple):
    """Factors of corrected gradients, in the computation's dtype.

    Of the tensors of a group: [n] where nothing else is said. Or of one tensor, 0-d.
    """

    scale: Tensor
    """The factor of the global clip, s, 0-d."""
    kappa: Tensor
    """The strength of the correction."""
    clip: Tensor
    """The factor that clips the corrected gradient."""
    unusable: Tensor
    """Bools: h is not finite. kappa is 0 then."""
    applied: Tensor
    """`StepFactors.applied`."""
    keep: bool
    """Whether the kernel makes the gradient just used the last gradient."""
    stacks: bool = False
    """Whether the tensors are stacks of matrices: where g is exactly 0, h is taken as 0."""


def corrected_gradient_(g: Tensor, h: Tensor, f: Corrections) -> Tensor:
    """Return the clipped corrected gradient (equation 4.2), and set h to s g in place if `f.keep`.

    It is made of the gradient after the global clip. An expert that got no token has gradient 0. It
    gets no correction, which would only undo a part of its last gradient.
    """
    used = g.to(f.scale.dtype) * f.scale
    last = used.where(f.unusable, h.to(used.dtype))
    if f.stacks:
        last = used.where(g == 0, last)
    corrected = (used + f.kappa * (used - last)) * f.clip
    if f.keep:
        write_if(f.applied, h, used)
    return corrected


def write_if(applied: Tensor, target: Tensor, values: Tensor) -> None:
    """Write `values` to `target` in its dtype, if the step is applied: `StepFactors.applied`.

    On a CPU it is, as the host has seen (`MARS.step`), and no kernel spends time on the choice.
    That took a sixth of a step, and half of one whose last gradients are in bfloat16.
    """
    if not target.is_cpu:
        values = values.where(applied, target.to(values.dtype))
    target.copy_(values)
