"""The MARS family in float64, one tensor at a time.

It is written from the update rules, and not from the code under test.
"""

import torch
from torch import Tensor

JORDAN = [(3.4445, -4.7750, 2.0315)] * 5
# arXiv 2505.16932, for a start divided by 1.01 times the Frobenius norm.
POLAR_EXPRESS = [
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
]


METHODS = {
    "newton-schulz": (1.0, JORDAN),
    "polar-express": (1.01, POLAR_EXPRESS),
    "deepseek-v4": (1.0, [*JORDAN, *JORDAN[:3], (2, -1.5, 0.5), (2, -1.5, 0.5)]),
    "cubic5": (
        1.0,
        [
            (3.3656576, -3.3420992, 0),
            (2.5744352, -1.4957376, 0),
            (2.5368962, -1.4312570, 0),
            (2.4418906, -1.2764040, 0),
            (2.2230472, -0.9630650, 0),
        ],
    ),
}


def orthogonalized(x: Tensor, method: str = "newton-schulz") -> Tensor:
    """Return one float64 matrix after five odd polynomials."""
    if x.shape[0] > x.shape[1]:
        return orthogonalized(x.T, method).T
    margin, polynomials = METHODS[method]
    x = x / (margin * x.pow(2).sum().sqrt() + 1e-7)
    for a, b, c in polynomials:
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def direction(rule: str, m: Tensor, options: dict | None = None) -> Tensor:
    """Return the direction that Lion, Shampoo and Muon make of a momentum.

    `options` are those of matrix rules.
    """
    if "lion" in rule:
        return m.sign()
    options = options or {}
    if m.ndim == 3:
        return torch.stack([direction(rule, each, options) for each in m])
    rows, cols = m.shape
    if options.get("zero_mean"):
        m = m - torch.ones(rows, 1, dtype=m.dtype) @ m.sum(0, keepdim=True) / rows
    if options.get("equilibrate"):
        size = float(m.norm()) / rows**0.5
        m = torch.stack([row * (size / float(row.norm())) for row in m])
    o = orthogonalized(m, options.get("orthogonalize", "newton-schulz"))
    if options.get("equilibrate"):
        o = o * (min(rows, cols) ** 0.5 / float(o.norm()))
    return o * (
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
    **options,
) -> tuple[Tensor, int]:
    """Return the parameter after the steps, in float64, and on how many the clip was active.

    `gamma` and `betas` may be lists, one for each step; `last` a list of the h of each step (exact
    mode) after the first. `options` are those of `direction`.
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
            update = direction(rule, m, options)
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
        update = (b1 * m + (1 - b1) * g).sign()
        x = x - lr * (update + weight_decay * x)
        m = b2 * m + (1 - b2) * g
    return x


def muon(x: Tensor, gradients: list[Tensor], *, lr, momentum, weight_decay, **options) -> Tensor:
    """Return the parameter after steps of Muon in Moonlight's form (arXiv 2502.16982).

    `momentum` may be a list, one for each step.
    """
    x, buffer = x.double(), torch.zeros_like(x.double())
    for t, g in enumerate(g.double() for g in gradients):
        mu = momentum[t] if isinstance(momentum, list) else momentum
        buffer = mu * buffer + g
        update = direction("muon", g + mu * buffer, options)
        x = x - lr * (update + weight_decay * x)
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
