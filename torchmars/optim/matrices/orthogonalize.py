"""Orthogonalisation: roughly the nearest orthogonal matrix. Groups name a method of it.

Another method is a subclass of `Orthogonalizer`, in the table, and a name of
`settings.ORTHOGONALIZE`.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

Polynomial = tuple[float, float, float]  # a, b, c of a x + b x^3 + c x^5

# Of the long side over the short one: below it the Gram form has more operations.
GRAM_PAYS = 1.5
# The step of the iteration before which the Gram form starts again from the matrix. The product of
# a matrix with itself has the squares of its singular values: small ones are lost in rounding, and
# each step multiplies the loss by up to a^2.
GRAM_RESTART = 2


class Orthogonalizer(ABC):
    """A method, and its cost."""

    @abstractmethod
    def __call__(
        self,
        matrices: Tensor,
        dtype: torch.dtype | None = None,
        form: str = "direct",
        rounded: torch.dtype | None = None,
    ) -> Tensor:
        """Map every singular value of each matrix near 1, keeping its singular vectors.

        `matrices` is a batch [n, rows, cols], of which none depends on the others. `dtype` is the
        one to multiply in; None: that of the matrices. Returns a tensor of their shape and of this
        dtype. `form` is one of `settings.ORTHOGONALIZE_FORM`. `rounded` is the coarsest dtype that
        the matrices were kept in; None: theirs.
        """

    @abstractmethod
    def flops(self, rows: int, cols: int, gram: bool = False) -> int:
        """Return the floating-point operations on one matrix, direct or in Gram form."""


class Iteration(Orthogonalizer):
    """An iteration of odd polynomials, by matrix products alone: each is one batched call.

    After division by the Frobenius norm times `margin`, x <- a x + (b A + c A^2) x for each
    polynomial, where A = x x^T and x is wide.
    """

    def __init__(self, polynomials: Sequence[Polynomial], margin: float = 1.0) -> None:
        self.polynomials, self.margin, self.eps = polynomials, margin, 1e-7

    def __call__(
        self,
        matrices: Tensor,
        dtype: torch.dtype | None = None,
        form: str = "direct",
        rounded: torch.dtype | None = None,
    ) -> Tensor:
        dtype = dtype or matrices.dtype
        tall = matrices.shape[-2] > matrices.shape[-1]
        x = matrices.mT if tall else matrices
        norms = torch.linalg.vector_norm(
            x, dim=(-2, -1), keepdim=True, dtype=torch.promote_types(x.dtype, torch.float32)
        )
        if self.margin != 1:
            norms = self.margin * norms
        x = x / (norms + self.eps)
        short, long = x.shape[-2:]
        if in_gram_form(short, long, dtype, form):
            # The digits of bfloat16 are too few for it. All numbers here are in float16's range.
            x = self._gram(x.to(torch.float16 if dtype == torch.bfloat16 else dtype)).to(dtype)
        else:
            x = self._direct(x.to(dtype))
        return x.mT if tall else x

    def _direct(self, x: Tensor) -> Tensor:
        for a, b, c in self.polynomials:
            gram = torch.bmm(x, x.mT)  # `@` costs the host a tenth more of all products
            x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
        return x

    def _gram(self, x: Tensor) -> Tensor:
        for first in (0, GRAM_RESTART):
            last = GRAM_RESTART if first == 0 else len(self.polynomials)
            x = torch.bmm(polynomial_of_gram(x, self.polynomials[first:last]), x)
        return x

    def flops(self, rows: int, cols: int, gram: bool = False) -> int:
        short, long = sorted((rows, cols))
        square, steps = 2 * short**3, len(self.polynomials)
        if not gram:
            return steps * (4 * short**2 * long + square)
        # Of each step: A^2, and to go on three products, except the first Q and the last A.
        return 2 * (4 * short**2 * long) + square * (steps + 3 * (steps - 2))


def in_gram_form(rows: int, cols: int, dtype: torch.dtype, form: str) -> bool:
    """Return whether a matrix [rows, cols] that is multiplied in `dtype` takes the Gram form.

    `form` "auto": where it has fewer operations. With bfloat16 auto is direct. There the Gram form
    multiplies in float16, which CPUs do slowly.
    """
    short, long = sorted((rows, cols))
    pays = long >= GRAM_PAYS * short and dtype.itemsize >= 4
    return form == "gram" or (form == "auto" and pays)


def polynomial_of_gram(x: Tensor, polynomials: Sequence[Polynomial]) -> Tensor:
    """Return the matrix Q for which Q x is the result of the `polynomials` on x, one by one.

    `x` [n, short, long]. R = x x^T, Z = b R + c R^2: Q <- Q Z + a Q, R <- (a + Z) R (a + Z). All
    these matrices are symmetric and commute.
    """
    r, q = torch.bmm(x, x.mT), None
    for number, (a, b, c) in enumerate(polynomials, 1):
        z = torch.baddbmm(r, r, r, beta=b, alpha=c)
        if number < len(polynomials):
            half = torch.baddbmm(r, z, r, beta=a)
            r = torch.baddbmm(half, half, z, beta=a)
        if q is None:
            q = z
            q.diagonal(dim1=-2, dim2=-1).add_(a)
        else:
            q = torch.baddbmm(q, q, z, beta=a)
    assert q is not None
    return q


class SingularValues(Orthogonalizer):
    """The polar factor, by the singular value decomposition: for tests and small models.

    Singular values that rounding makes of 0 stay 0, so a matrix of zeros does.
    """

    def __call__(
        self,
        matrices: Tensor,
        dtype: torch.dtype | None = None,
        form: str = "direct",
        rounded: torch.dtype | None = None,
    ) -> Tensor:
        # In float32 a singular value of 1e-4 of the largest is already in doubt. And one by one: a
        # batch does not give the bits of its matrices alone, of which another layout has others.
        kept = rounded or matrices.dtype
        factors = [self._factor(matrix, kept) for matrix in matrices.to(torch.float64)]
        return torch.stack(factors).to(dtype or matrices.dtype)

    @staticmethod
    def _factor(matrix: Tensor, rounded: torch.dtype) -> Tensor:
        left, values, right = torch.linalg.svd(matrix, full_matrices=False)
        return (left * (values > noise(matrix, values[:1], rounded))) @ right

    def flops(self, rows: int, cols: int, gram: bool = False) -> int:
        # Golub & Van Loan, Matrix Computations, 4th edition, table 8.6.1: R-SVD with U and V.
        short, long = sorted((rows, cols))
        return 6 * short**2 * long + 20 * short**3


def noise(matrix: Tensor, largest: Tensor, rounded: torch.dtype) -> Tensor:
    """Return how large a singular value of 0 may be for rounding alone.

    `largest` is the largest one, and `rounded` the dtype that the matrix was kept in. What computed
    the matrix was at best in float32: the usual max(rows, cols) eps of the largest bounds that.
    In bfloat16 this would be all of most matrices. There entries are rounded each on its own, which
    adds no more than about eps times the longest row and the longest column (Bandeira and van
    Handel, arXiv 1408.6185).
    """
    eps = torch.finfo(rounded).eps
    computed = largest * (max(matrix.shape) * min(eps, torch.finfo(torch.float32).eps))
    longest = sum(torch.linalg.vector_norm(matrix, dim=dim).max() for dim in (0, 1))
    return torch.maximum(computed, eps * longest)


ORTHOGONALIZERS: dict[str, Orthogonalizer] = {
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
    "svd": SingularValues(),
}
