"""What an owner makes of whole momenta: the directions of a step.

Sources: NorMuon, Li et al., arXiv 2510.05491; rows of one norm, arXiv 2603.28254; the norm of an
orthogonal matrix, arXiv 2602.21545.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from torchmars.optim.orthogonalize import ORTHOGONALIZERS, in_gram_form
from torchmars.optim.settings import Settings

ROW_BETA = 0.95  # the decay of the rows' mean squares, of NorMuon
ROW_EPS = 1e-8


@dataclass(frozen=True)
class Directions:
    """How a group's momenta become directions: the settings of its group that say it."""

    orthogonalize: str
    orthogonalize_form: str
    equilibrate: bool
    renormalize: bool
    normalize_rows: bool

    @classmethod
    def of(cls, settings: Settings) -> "Directions":
        """Return those of a group with these `settings`."""
        return cls(**{name: settings[name] for name in cls.__dataclass_fields__})

    def flops(self, rows: int, cols: int, product: torch.dtype) -> int:
        """Return the floating-point operations on one matrix that is multiplied in `product`."""
        gram = in_gram_form(rows, cols, product, self.orthogonalize_form)
        return ORTHOGONALIZERS[self.orthogonalize].flops(rows, cols, gram)

    def __call__(
        self, momenta: Tensor, product: torch.dtype, squares: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return directions of the shape and dtype of `momenta`, and the rows' new mean squares.

        `momenta` is a batch [n, rows, cols], `product` the dtype to multiply in. `squares` [n,
        rows], with `normalize_rows`, are the mean squares after the last step: 0 before the first.
        """
        x = equilibrated(momenta) if self.equilibrate else momenta
        o = ORTHOGONALIZERS[self.orthogonalize](x, product, self.orthogonalize_form)
        if self.renormalize:
            o = renormalized(o)
        if squares is not None:
            o, squares = with_normalized_rows(o, squares)
        return o.to(momenta.dtype), squares


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


def with_normalized_rows(directions: Tensor, squares: Tensor) -> tuple[Tensor, Tensor]:
    """Return NorMuon's directions, of the norm of `directions`, and its new mean squares.

    `directions` O [n, rows, cols], `squares` v [n, rows] of those before:
    v <- b v + (1 - b) mean_j O_ij^2, and each row of O is divided by v^(1/2) (arXiv 2510.05491,
    algorithm 1). In float32 at least.
    """
    wide = directions.to(_wide(directions))
    squares = ROW_BETA * squares + (1 - ROW_BETA) * wide.square().mean(-1)
    divided = wide / (squares.sqrt() + ROW_EPS)[..., None]
    before, after = (
        torch.linalg.vector_norm(each, dim=(-2, -1), keepdim=True) for each in (wide, divided)
    )
    return divided * (before / after.where(after > 0, 1)), squares


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
