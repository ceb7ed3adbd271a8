"""From whole momenta to the directions of a step, on their owner.

Sources: rows of one norm, arXiv 2603.28254; the norm of an orthogonal matrix, arXiv 2602.21545.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from torchmars.optim.matrices.orthogonalize import ORTHOGONALIZERS
from torchmars.optim.rules import RULES, MatrixRule
from torchmars.optim.settings import Settings


@dataclass(frozen=True)
class Directions:
    """How a group's momenta become directions: the settings of its group that say it."""

    rule: str
    orthogonalize: str
    equilibrate: bool
    zero_mean: bool

    @classmethod
    def of(cls, settings: Settings) -> "Directions":
        """Return the directions of a group with these `settings`."""
        return cls(**{name: settings[name] for name in cls.__dataclass_fields__})

    def orthogonalized(self, momenta: Tensor) -> Tensor:
        """Return a batch of `momenta` [n, rows, cols], orthogonalised, in their dtype."""
        dtype = momenta.dtype
        if self.zero_mean:
            momenta = without(momenta, torch.ones_like(momenta[..., :1]))
        x = equilibrated(momenta) if self.equilibrate else momenta
        x = ORTHOGONALIZERS[self.orthogonalize](x, dtype)
        if not self.zero_mean:
            return x
        # Products in bfloat16 round too, and of 1e-3 an iteration makes 1/2.
        null = torch.ones_like(momenta[..., :1])
        if self.equilibrate:
            null = torch.linalg.vector_norm(momenta, dim=-1, keepdim=True)
        return without(x, null).to(x.dtype)

    def scaled(self, orthogonal: Tensor, shape: Sequence[int]) -> Tensor:
        """Return parts of matrices [rows, cols] = `shape` times the scale of each over theirs.

        With `equilibrate` they are renormalised first.
        """
        x = renormalized(orthogonal) if self.equilibrate else orthogonal
        scale = cast(MatrixRule, RULES[self.rule]).scale
        factor = scale(*x.shape[1:]) / scale(*shape)
        return x if factor == 1 else x * factor


def without(matrices: Tensor, null: Tensor) -> Tensor:
    """Return matrices [n, rows, cols] of whose columns none has a part along `null` [n, rows, 1].

    In float32 at least.
    """
    wide, null = matrices.to(_wide(matrices)), null.to(_wide(matrices))
    along = (null * wide).sum(-2, keepdim=True) / null.square().sum(-2, keepdim=True)
    return wide - null * along.where(along.isfinite(), 0)


def equilibrated(momenta: Tensor) -> Tensor:
    """Return matrices [n, rows, cols] whose rows have one norm, and the norm of before.

    In float32 at least. A row of zeros stays one.
    """
    wide = momenta.to(_wide(momenta))
    of_rows = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    norms = torch.linalg.vector_norm(of_rows, dim=-2, keepdim=True)
    return wide * (norms / wide.shape[-2] ** 0.5 / of_rows.where(of_rows > 0, 1))


def renormalized(directions: Tensor) -> Tensor:
    """Return matrices [n, rows, cols] times min(rows, cols)^(1/2) over their Frobenius norm.

    In float32 at least. A matrix of zeros stays one.
    """
    wide = directions.to(_wide(directions))
    norms = torch.linalg.vector_norm(wide, dim=(-2, -1), keepdim=True)
    return wide * (min(wide.shape[-2:]) ** 0.5 / norms.where(norms > 0, 1))


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
