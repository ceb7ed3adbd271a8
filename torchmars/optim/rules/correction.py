"""The variance reduction that the MARS rules share: the corrected gradient and its factors.

Sources: Yuan et al., "MARS", arXiv 2411.10438, equation 4.2; Liu et al., "MARS-M", arXiv
2510.21800.

Names: g gradient, h last gradient, s factor of the global clip, c corrected gradient.
"""

from typing import NamedTuple

import torch
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


def corrected_gradient(g: Tensor, h: Tensor, factors: TensorCorrection) -> tuple[Tensor, Tensor]:
    """Return the gradient after the global clip, and its clipped correction (equation 4.2)."""
    used = g.to(factors.scale.dtype) * factors.scale
    last = torch.where(factors.unusable, used, h.to(used.dtype))
    return used, (used + factors.kappa * (used - last)) * factors.clip


class GroupCorrections(NamedTuple):
    """The corrections of all tensors of a group. Tensors [n]."""

    kappa: Tensor
    clip: Tensor
    unusable: Tensor

    def of_each(self, scale: Tensor) -> list[TensorCorrection]:
        """Return the correction of each tensor, under the global clip's factor `scale`."""
        each = zip(self.kappa.unbind(), self.clip.unbind(), self.unusable.unbind())
        return [TensorCorrection(scale, *factors) for factors in each]


def strength(gamma: float, beta1: float) -> float:
    """Return kappa = gamma b1 / (1 - b1), the strength of the correction."""
    return gamma * beta1 / (1 - beta1)


def corrected_squared_norms(products: Tensor, scale: Tensor, kappa: Tensor) -> Tensor:
    """Return ||c||^2 for c = s g + kappa (s g - h).

    c is never made for it: its 2-norm follows from three inner products, and no other norm does.

    `products` [n, 3] are those of `passes.inner_products`, `scale` is s, `kappa` is [n].
    """
    gg, gh, hh = products.unbind(-1)
    return (
        ((1 + kappa) * scale) ** 2 * gg - 2 * kappa * (1 + kappa) * scale * gh + kappa**2 * hh
    ).clamp(min=0.0)
