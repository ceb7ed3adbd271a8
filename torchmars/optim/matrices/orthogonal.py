"""From whole matrices to the directions of a step, on their owner.

A matrix is equilibrated where its group says so, orthogonalised part by part, and scaled.
Sources: rows of one norm, arXiv 2603.28254; the norm of an orthogonal matrix, arXiv 2602.21545.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import Tensor

from torchmars.optim.matrices.shapes import MatrixShape
from torchmars.optim.rules import RULES, MatrixRule


@dataclass(frozen=True)
class Iteration:
    """An iteration of odd polynomials, by matrix products alone: each is one batched call.

    After division by the Frobenius norm times `margin`, x <- a x + (b A + c A^2) x for each
    polynomial, where A = x x^T and x is wide. It maps every singular value of each matrix near 1,
    and keeps the singular vectors.
    """

    polynomials: Sequence[tuple[float, float, float]]  # a, b, c of each
    margin: float = 1.0

    def __call__(self, matrices: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return a batch of `matrices` [n, rows, cols] orthogonalised, multiplied in `dtype`.

        None: in that of the matrices. None of them depends on the others.
        """
        tall = matrices.shape[-2] > matrices.shape[-1]
        x = matrices.mT if tall else matrices
        norms = torch.linalg.vector_norm(
            x, dim=(-2, -1), keepdim=True, dtype=torch.promote_types(x.dtype, torch.float32)
        )
        if self.margin != 1:
            norms = self.margin * norms
        x = (x / (norms + 1e-7)).to(dtype or matrices.dtype)
        for a, b, c in self.polynomials:
            gram = torch.bmm(x, x.mT)  # `@` costs the host a tenth more of all products
            if c:
                x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
            else:  # a cubic has no square
                x = torch.baddbmm(x, gram, x, beta=a, alpha=b)
        return x.mT if tall else x

    def flops(self, rows: int, cols: int) -> int:
        """Return the floating-point operations on one matrix."""
        short, long = sorted((rows, cols))
        squares = sum(c != 0 for _, _, c in self.polynomials)
        return len(self.polynomials) * 4 * short**2 * long + squares * 2 * short**3


# Each is a name of `settings.Method`.
ORTHOGONALIZERS = {
    # The quintic of Keller Jordan's Muon (Jordan et al., 2024), which every published MARS run
    # used.
    "newton-schulz": Iteration([(3.4445, -4.7750, 2.0315)] * 5),
    # Amsel et al., "The Polar Express", arXiv 2505.16932: the best polynomial of each step.
    "polar-express": Iteration(
        [
            (8.156554524902461, -22.48329292557795, 15.878769915207462),
            (4.042929935166739, -2.808917465908714, 0.5000178451051316),
            (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
            (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
            (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
        ],
        margin=1.01,
    ),
    # DeepSeek-V4's report, section 2.4, equation 28: eight steps that lift, two that settle at 1.
    "deepseek-v4": Iteration([(3.4445, -4.7750, 2.0315)] * 8 + [(2.0, -1.5, 0.5)] * 2),
    # Huang, arXiv 2606.00371: cubics, whose band is 1 +- 0.3. Digits of Emerging-Optimizers.
    "cubic5": Iteration(
        [
            (3.3656576, -3.3420992, 0.0),
            (2.5744352, -1.4957376, 0.0),
            (2.5368962, -1.4312570, 0.0),
            (2.4418906, -1.2764040, 0.0),
            (2.2230472, -0.9630650, 0.0),
        ]
    ),
}


class Directions(NamedTuple):
    """How a group's matrices become directions: the settings of its group that say it."""

    rule: str
    orthogonalize: str
    equilibrate: bool
    zero_mean: bool

    def __call__(self, matrices: Tensor, shape: MatrixShape | None, dtype: torch.dtype) -> Tensor:
        """Return the directions of whole `matrices` [n, rows, cols], in their dtype.

        They are multiplied in `dtype`. Those of parameters with a `shape` are cut as it says: parts
        are orthogonalised each on its own, and have the size that they would have in the whole.
        """
        scale = cast(MatrixRule, RULES[self.rule]).scale
        parts = []
        for part in [matrices] if shape is None else parts_of(matrices, shape):
            x = self.orthogonalized(part, dtype)
            if self.equilibrate:  # to the norm of an orthogonal one; a matrix of zeros stays one
                x = x.to(_wide(x))
                norms = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
                x = x * (min(x.shape[-2:]) ** 0.5 / norms.where(norms > 0, 1))
            factor = scale(*x.shape[1:]) / scale(*matrices.shape[1:])
            parts.append(x if factor == 1 else x * factor)
        whole = parts[0] if shape is None else put_together(parts, shape)
        return whole.to(matrices.dtype)

    def orthogonalized(self, part: Tensor, dtype: torch.dtype) -> Tensor:
        """Return parts [n, rows, cols] orthogonalised, multiplied in `dtype`."""
        ones = torch.ones_like(part[..., :1]) if self.zero_mean else None
        x = part if ones is None else without(part, ones)
        null = ones
        if self.equilibrate:  # rows of one norm, and the norm of before; a row of zeros stays one
            x = x.to(_wide(x))
            of_rows = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
            norms = torch.linalg.vector_norm(of_rows, dim=-2, keepdim=True)
            x = x * (norms / x.shape[-2] ** 0.5 / of_rows.where(of_rows > 0, 1))
            null = ones if ones is None else of_rows
        x = ORTHOGONALIZERS[self.orthogonalize](x, dtype)
        # Products in bfloat16 round too, and of 1e-3 an iteration makes 1/2.
        return x if null is None else without(x, null).to(x.dtype)


def parts_of(matrices: Tensor, shape: MatrixShape) -> list[Tensor]:
    """Return the parts [n, out, in] of whole `matrices` [n, rows, cols] that take turns."""
    oriented = matrices.mT if shape.transposed else matrices
    turns = oriented.unflatten(1, (-1, sum(shape.parts))).split(shape.parts, dim=2)
    return [each.flatten(1, 2).contiguous() for each in turns]


def put_together(parts: Sequence[Tensor], shape: MatrixShape) -> Tensor:
    """Return the whole matrices [n, rows, cols] of `parts`, as `parts_of` returns them."""
    turns = [each.unflatten(1, (-1, rows)) for each, rows in zip(parts, shape.parts)]
    whole = torch.cat(turns, dim=2).flatten(1, 2)
    return whole.mT if shape.transposed else whole


def without(matrices: Tensor, null: Tensor) -> Tensor:
    """Return matrices [n, rows, cols] of whose columns none has a part along `null` [n, rows, 1].

    In float32 at least.
    """
    wide, null = matrices.to(_wide(matrices)), null.to(_wide(matrices))
    along = (null * wide).sum(-2, keepdim=True) / null.square().sum(-2, keepdim=True)
    return wide - null * along.where(along.isfinite(), 0)


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
