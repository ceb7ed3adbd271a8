"""Matrices by which methods of orthogonalisation are judged, and what their errors are."""

from collections.abc import Iterator

import torch
from torch import Tensor

from torchmars.optim.matrices.orthogonalize import ORTHOGONALIZERS


def spectra(short: int, long: int, seed: int = 0) -> Iterator[tuple[str, Tensor]]:
    """Yield a name and a matrix [short, long] in float64: of three kinds of singular values."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    yield "random", random(short, long)
    left, right = torch.linalg.qr(random(short, short))[0], torch.linalg.qr(random(long, short))[0]
    yield "decaying", left @ torch.logspace(0, -6, short, dtype=torch.float64).diag() @ right.T
    yield "low rank", random(short, short // 8) @ random(short // 8, long)


def error(matrix: Tensor, method: str, dtype: torch.dtype, form: str) -> float:
    """Return how far a method's result is from its direct form in float64, relative.

    The matrix is rounded to `dtype` before both.
    """
    orthogonalize, rounded = ORTHOGONALIZERS[method], matrix[None].to(dtype)
    wanted = orthogonalize(rounded.double())
    return float((orthogonalize(rounded, dtype, form).double() - wanted).norm() / wanted.norm())
