"""The arithmetic that the rules' kernels share: the corrected gradient, and writes on condition.

Sources: Yuan et al., "MARS", arXiv 2411.10438, equation 4.2; Liu et al., "MARS-M", arXiv
2510.21800.

Names: g gradient, h last gradient, s factor of the global clip, c corrected gradient.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


class TensorCorrection(NamedTuple):
    """What makes the corrected gradient of one tensor. 0-d tensors in the computation's dtype."""

    scale: Tensor
    """The factor of the global clip, s."""
    kappa: Tensor
    """The strength of the correction."""
    clip: Tensor
    """The factor that clips the corrected gradient."""
    unusable: Tensor
    """A bool: h is not finite or too large to compute with. kappa is 0 then."""
    applied: Tensor
    """`StepFactors.applied`."""
    keep: bool
    """Whether the gradient just used becomes the last gradient."""


def corrected_gradient(g: Tensor, h: Tensor, f: TensorCorrection) -> tuple[Tensor, Tensor]:
    """Return the gradient after the global clip, and its clipped correction (equation 4.2)."""
    used = g.to(f.scale.dtype) * f.scale
    last = used.where(f.unusable, h.to(used.dtype))
    return used, (used + f.kappa * (used - last)) * f.clip


def write_if(applied: Tensor, target: Tensor, values: Tensor) -> None:
    """Write `values` to `target` in its dtype, if the step is applied: `StepFactors.applied`.

    On a CPU it is, as the host has seen (`MARS.step`), and no kernel spends time on the choice.
    That took a sixth of a step, and half of one whose last gradients are in bfloat16.
    """
    if not target.is_cpu:
        values = values.where(applied, target.to(values.dtype))
    target.copy_(values)
