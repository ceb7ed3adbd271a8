"""The MARS family in float64, one tensor at a time.

It is written from the update rules, and not from the code under test.
"""

import torch
from torch import Tensor


def newton_schulz(x: Tensor) -> Tensor:
    """Return one float64 matrix after five steps of the quintic."""
    if x.shape[0] > x.shape[1]:
        return newton_schulz(x.T).T
    x = x / (x.pow(2).sum().sqrt() + 1e-7)
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x


def direction(rule: str, m: Tensor) -> Tensor:
    """Return the direction that Lion, Shampoo and Muon make of a momentum."""
    if "lion" in rule:
        return m.sign()
    if m.ndim == 3:
        return torch.stack([direction(rule, matrix) for matrix in m])
    rows, cols = m.shape
    return newton_schulz(m) * (
        max(1.0, rows / cols) ** 0.5 if rule == "mars-shampoo" else 0.2 * max(rows, cols) ** 0.5
    )


def mars(
    x: Tensor,
    gradients: list[Tensor],
    *,
    rule="mars-adamw",
    lr=6e-3,
    betas=(0.95, 0.99),
    eps=1e-8,
    weight_decay=0.1,
    gamma=0.025,
    clip=1.0,
    last=None,
) -> tuple[Tensor, int]:
    """Return the parameter after the steps, in float64, and on how many the clip was active.

    `gamma` and `betas` may be lists, one for each step; `last` a list of the h of each step (exact
    mode) after the first.
    """
    x = x.double()
    m, v, h, clipped = torch.zeros_like(x), torch.zeros_like(x), None, 0
    for t, g in enumerate((g.double() for g in gradients), start=1):
        gamma_t = gamma[t - 1] if isinstance(gamma, list) else gamma
        b1, b2 = betas[t - 1] if isinstance(betas, list) else betas
        kappa = gamma_t * b1 / (1 - b1)
        if t > 1 and last is not None:
            h = last[t - 1].double()
        h = g if h is None else h
        if x.ndim == 3:  # experts: one without tokens has gradient 0, and no correction
            h = torch.where(g == 0, 0, h)
        c = g + kappa * (g - h)
        norm = float(c.pow(2).sum()) ** 0.5
        if clip is not None and norm > clip:
            c, clipped = c * (clip / norm), clipped + 1
        m = b1 * m + (1 - b1) * c
        if rule == "mars-adamw":
            v = b2 * v + (1 - b2) * c**2
            update = m / (1 - b1**t) / ((v / (1 - b2**t)).sqrt() + eps)
        else:
            update = direction(rule, m)
        x = x - lr * (update + weight_decay * x)
        h = g
    return x, clipped


def lion(x: Tensor, gradients: list[Tensor], *, lr, betas, weight_decay) -> Tensor:
    """Return the parameter after steps of Lion (Chen et al., arXiv 2302.06675, algorithm 2).

    `betas` may be a list of pairs, one for each step.
    """
    x, m = x.double(), torch.zeros_like(x.double())
    for t, g in enumerate(g.double() for g in gradients):
        b1, b2 = betas[t] if isinstance(betas, list) else betas
        x = x - lr * ((b1 * m + (1 - b1) * g).sign() + weight_decay * x)
        m = b2 * m + (1 - b2) * g
    return x


def muon(x: Tensor, gradients: list[Tensor], *, lr, momentum, weight_decay) -> Tensor:
    """Return the parameter after steps of Muon in Moonlight's form (arXiv 2502.16982).

    `momentum` may be a list, one for each step.
    """
    x, buffer = x.double(), torch.zeros_like(x.double())
    for t, g in enumerate(g.double() for g in gradients):
        mu = momentum[t] if isinstance(momentum, list) else momentum
        buffer = mu * buffer + g
        x = x - lr * (direction("muon", g + mu * buffer) + weight_decay * x)
    return x


def gradients(shape: tuple[int, ...], steps: int, seed: int, dtype=torch.float32) -> list[Tensor]:
    """Return random gradients, related from step to step, whose size changes.

    A clip of 1 is active on some of them.
    """
    generator = torch.Generator().manual_seed(seed)
    base = torch.randn(shape, generator=generator, dtype=torch.float64)
    size = base.numel() ** -0.5
    return [
        (
            (base + torch.randn(shape, generator=generator, dtype=torch.float64))
            * size
            * (0.3 + 0.4 * (t % 4))
        ).to(dtype)
        for t in range(steps)
    ]
