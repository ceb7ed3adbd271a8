"""Matrices by which methods of orthogonalisation are judged."""

from collections.abc import Iterator

import torch
from torch import Tensor


def spectra(short: int, long: int, seed: int = 0) -> Iterator[tuple[str, Tensor]]:
    """Yield a name and a matrix [short, long] in float64: of three kinds of singular values."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    yield "random", random(short, long)
    left, right = torch.linalg.qr(random(short, short))[0], torch.linalg.qr(random(long, short))[0]
    yield "decaying", left @ torch.logspace(0, -6, short, dtype=torch.float64).diag() @ right.T
    yield "low rank", random(short, short // 8) @ random(short // 8, long)
