"""Orthogonalisation: roughly the nearest orthogonal matrix. Rules name a method of it.

Another method is a subclass of `Orthogonalizer`, in the table.
"""

from abc import ABC, abstractmethod

import torch
from torch import Tensor


class Orthogonalizer(ABC):
    """A method, and what it costs."""

    @abstractmethod
    def __call__(self, matrices: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Map every singular value of each matrix near 1, keeping its singular vectors.

        `matrices` is a batch [n, rows, cols], of which none depends on the others. `dtype` is the
        one to multiply in; None: that of the matrices. Returns a tensor of their shape and dtype.
        """

    @abstractmethod
    def flops(self, rows: int, cols: int) -> int:
        """Return the floating-point operations on one matrix."""


class NewtonSchulz(Orthogonalizer):
    """Newton–Schulz iteration, by matrix products alone: each is one batched call.

    After division by the Frobenius norm, x <- a x + (b A + c A^2) x several times, where A = x x^T.
    """

    def __init__(self, coefficients: tuple[float, float, float], steps: int, eps: float) -> None:
        self.coefficients, self.steps, self.eps = coefficients, steps, eps

    def __call__(self, matrices: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        a, b, c = self.coefficients
        tall = matrices.shape[-2] > matrices.shape[-1]
        x = matrices.mT if tall else matrices
        norms = torch.linalg.vector_norm(
            x, dim=(-2, -1), keepdim=True, dtype=torch.promote_types(x.dtype, torch.float32)
        )
        x = (x / (norms + self.eps)).to(dtype or matrices.dtype)
        for _ in range(self.steps):
            gram = x @ x.mT
            x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
        return (x.mT if tall else x).to(matrices.dtype)

    def flops(self, rows: int, cols: int) -> int:
        short, long = sorted((rows, cols))
        return self.steps * (4 * short**2 * long + 2 * short**3)


ORTHOGONALIZERS: dict[str, Orthogonalizer] = {
    # The quintic of Keller Jordan's Muon (Jordan et al., 2024), which every published MARS run
    # used.
    "newton-schulz": NewtonSchulz((3.4445, -4.7750, 2.0315), steps=5, eps=1e-7),
}
