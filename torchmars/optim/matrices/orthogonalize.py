"""Orthogonalisation: roughly the nearest orthogonal matrix. Groups name a method of it.

Another method is a row of the table, and a name of `settings.ORTHOGONALIZE`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

Polynomial = tuple[float, float, float]  # a, b, c of a x + b x^3 + c x^5


class Iteration:
    """An iteration of odd polynomials, by matrix products alone: each is one batched call.

    After division by the Frobenius norm times `margin`, x <- a x + (b A + c A^2) x for each
    polynomial, where A = x x^T and x is wide.
    """

    def __init__(self, polynomials: Sequence[Polynomial], margin: float = 1.0) -> None:
        self.polynomials, self.margin, self.eps = polynomials, margin, 1e-7

    def __call__(self, matrices: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Map every singular value of each matrix near 1, keeping its singular vectors.

        `matrices` is a batch [n, rows, cols], of which none depends on the others. `dtype` is the
        one to multiply in; None: that of the matrices. Returns a tensor of their shape and of this
        dtype.
        """
        tall = matrices.shape[-2] > matrices.shape[-1]
        x = matrices.mT if tall else matrices
        norms = torch.linalg.vector_norm(
            x, dim=(-2, -1), keepdim=True, dtype=torch.promote_types(x.dtype, torch.float32)
        )
        if self.margin != 1:
            norms = self.margin * norms
        x = (x / (norms + self.eps)).to(dtype or matrices.dtype)
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
        squares = sum(c != 0 for *_, c in self.polynomials)
        return len(self.polynomials) * 4 * short**2 * long + squares * 2 * short**3


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
