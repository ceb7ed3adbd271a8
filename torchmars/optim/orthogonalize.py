"""Newton–Schulz iteration: roughly the nearest orthogonal matrix, by matrix products alone."""

import torch
from torch import Tensor

# The quintic of Keller Jordan's Muon, which every published MARS run used.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5


def orthogonalize(matrices: Tensor, dtype: torch.dtype | None = None, eps: float = 1e-7) -> Tensor:
    """Map every singular value of each matrix near 1, keeping its singular vectors.

    Args:
        matrices: a batch [n, rows, cols]. Each product is one batched call. The result of a matrix
            does not depend on the others of its batch.
        dtype: the dtype to multiply in; None: that of the matrices, to which the result is rounded.
        eps: added to the Frobenius norm that each matrix is divided by.

    Returns a tensor of the same shape and dtype, after five steps of x <- a x + (b A + c A^2) x,
    where A = x x^T. Source: Jordan et al., "Muon", 2024.
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
    """Return the floating-point operations of `orthogonalize` on one matrix.

    They are STEPS (4 s^2 l + 2 s^3), where s is the short side and l the long one.
    """
    short, long = sorted((rows, cols))
    return STEPS * (4 * short**2 * long + 2 * short**3)
