"""Newton–Schulz: the nearest orthogonal matrix, roughly, from matrix products alone."""

import torch
from torch import Tensor

# The quintic of Keller Jordan's Muon, which every published MARS run used.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5


def orthogonalize(matrices: Tensor, dtype: torch.dtype | None = None, eps: float = 1e-7) -> Tensor:
    """Map every singular value of each matrix near 1, keeping its singular vectors.

    Args:
        matrices: a batch [n, rows, cols]. All are of one shape, so that each product is one
            batched call; a matrix's result does not depend on the others of its batch.
        dtype: what to multiply in; None: the matrices' own. The result is rounded to theirs.
        eps: added to the Frobenius norm that each matrix is divided by.

    Returns the same shape and dtype. Source: Jordan et al., "Muon", 2024; five steps of x <- a x + (b A + c A^2) x, A = x x^T.
    """
    a, b, c = COEFFICIENTS
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    norms = torch.linalg.vector_norm(
        x, dim=(-2, -1), keepdim=True, dtype=torch.promote_types(x.dtype, torch.float32)
    )
    x = (x / (norms + eps)).to(dtype or matrices.dtype)
    for _ in range(STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).to(matrices.dtype)


def newton_schulz_flops(rows: int, cols: int) -> int:
    """Floating-point operations of `orthogonalize` on one matrix: STEPS (4 s^2 l + 2 s^3), s and l the short and long side."""
    short, long = sorted((rows, cols))
    return STEPS * (4 * short**2 * long + 2 * short**3)
