"""MARS in float64, one tensor at a time, written from the update rule and not from the code under test."""

import torch
from torch import Tensor


def mars_adamw(x: Tensor, gradients: list[Tensor], *, lr, betas, eps, weight_decay, gamma, clip) -> tuple[Tensor, int]:
    """The parameter after the steps, in float64, and the number of steps on which the clip was active."""
    x, (b1, b2) = x.double(), betas
    m, v, h, clipped = torch.zeros_like(x), torch.zeros_like(x), None, 0
    kappa = gamma * b1 / (1 - b1)
    for t, g in enumerate((g.double() for g in gradients), start=1):
        h = g if h is None else h
        c = g + kappa * (g - h)
        norm = float(c.pow(2).sum()) ** 0.5
        if clip is not None and norm > clip:
            c, clipped = c * (clip / norm), clipped + 1
        m = b1 * m + (1 - b1) * c
        v = b2 * v + (1 - b2) * c**2
        m_hat, v_hat = m / (1 - b1**t), v / (1 - b2**t)
        x = x - lr * (m_hat / (v_hat.sqrt() + eps) + weight_decay * x)
        h = g
    return x, clipped


def gradients(shape: tuple[int, ...], steps: int, seed: int, dtype=torch.float32) -> list[Tensor]:
    """Random gradients that are related from step to step and change in size, so that a clip of 1 is active on some."""
    generator = torch.Generator().manual_seed(seed)
    base = torch.randn(shape, generator=generator, dtype=torch.float64)
    size = base.numel() ** -0.5
    return [((base + torch.randn(shape, generator=generator, dtype=torch.float64)) * size * (0.3 + 0.4 * (t % 4))).to(dtype)
            for t in range(steps)]
