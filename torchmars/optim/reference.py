"""Every rule in a few lines, on one whole tensor: the results of `MARS` without its machinery.

The sources are those of `rules.py`.

Each rule is a function that makes one step in place. It takes a tensor `x`, its gradient `g` after
the global clip (see `global_clip`), its state and its settings by name; those that it does not use
itself go on to what it calls, where their meaning stands. In exact mode `last` is one of them. The
state of a tensor is a dict, empty before the first step. All numbers are of the dtype of `x`, which
may be any floating-point dtype. The functions are slow and know no shards: use them to read, to
teach and to test.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchmars.optim.matrices.orthogonal import ORTHOGONALIZERS
from torchmars.optim.settings import Settings

State = dict[str, Tensor]
Betas = tuple[float, float]
Options = Settings | None


def mars_adamw(x: Tensor, g: Tensor, state: State, **settings: Any) -> None:
    """Step by AdamW's two moments of the corrected gradient c: v is built from c, not from g."""
    adamw(x, corrected_gradient(g, state, **settings), state, **settings)


def mars_lion(x: Tensor, g: Tensor, state: State, **settings: Any) -> None:
    """Set x <- x - lr (sign(m) + weight_decay x), m the momentum of the corrected gradient."""
    m = corrected_momentum(g, state, **settings)
    descend(x, m.sign(), **settings)


def mars_shampoo(
    x: Tensor, g: Tensor, state: State, *, options: Options = None, **settings: Any
) -> None:
    """Set x <- x - lr (max(1, rows / cols)^(1/2) O(m) + weight_decay x).

    `x` is a matrix [rows, cols] or a stack of them, m the momentum of the corrected gradient, O
    that of `orthogonal_direction`, as are the `options`. So do the others with an O.
    """
    m = corrected_momentum(g, state, **settings)
    rows, cols = x.shape[-2:]
    descend(x, max(1.0, rows / cols) ** 0.5 * orthogonal_direction(m, options), **settings)


def mars_m(x: Tensor, g: Tensor, state: State, *, options: Options = None, **settings: Any) -> None:
    """Set x <- x - lr (0.2 max(rows, cols)^(1/2) O(m) + weight_decay x)."""
    m = corrected_momentum(g, state, **settings)
    descend(x, 0.2 * max(x.shape[-2:]) ** 0.5 * orthogonal_direction(m, options), **settings)


def adamw(x: Tensor, g: Tensor, state: State, *, betas: Betas, eps: float, **settings: Any) -> None:
    """Set x <- x - lr (m' / (v'^(1/2) + eps) + weight_decay x), m' and v' without their bias."""
    beta1, beta2 = betas
    zeros = torch.zeros_like(x)
    step = state["step"] = state.get("step", torch.zeros(())) + 1
    m = state["exp_avg"] = beta1 * state.get("exp_avg", zeros) + (1 - beta1) * g
    v = state["exp_avg_sq"] = beta2 * state.get("exp_avg_sq", zeros) + (1 - beta2) * g * g
    t = step.item()
    m, v = m / (1 - beta1**t), v / (1 - beta2**t)  # without the bias towards zero
    descend(x, m / (v.sqrt() + eps), **settings)


def lion(x: Tensor, g: Tensor, state: State, *, betas: Betas, **settings: Any) -> None:
    """Step by the sign of an average of m and g; m becomes an average with other weights."""
    beta1, beta2 = betas
    m = state.get("exp_avg", torch.zeros_like(x))
    descend(x, (beta1 * m + (1 - beta1) * g).sign(), **settings)
    state["exp_avg"] = beta2 * m + (1 - beta2) * g


def muon(
    x: Tensor, g: Tensor, state: State, *, betas: Betas, options: Options = None, **settings: Any
) -> None:
    """Step by the orthogonalised Nesterov momentum (decay betas[0]), with the scale of `mars_m`."""
    mu, _ = betas
    buffer = mu * state.get("momentum_buffer", torch.zeros_like(x)) + g
    o = orthogonal_direction((1 - mu) * (g + mu * buffer), options)
    descend(x, 0.2 * max(x.shape[-2:]) ** 0.5 * o, **settings)
    state["momentum_buffer"] = buffer


# The function of each rule, by its name.
REFERENCES: dict[str, Callable[..., None]] = {
    "mars-adamw": mars_adamw,
    "mars-lion": mars_lion,
    "mars-shampoo": mars_shampoo,
    "mars-m": mars_m,
    "adamw": adamw,
    "lion": lion,
    "muon": muon,
}


def global_clip(gradients: Sequence[Tensor], max_grad_norm: float) -> list[Tensor]:
    """Return all gradients of a model, scaled so that their common norm is at most this."""
    norm = torch.stack([g.double().square().sum() for g in gradients]).sum().sqrt()
    scale = (max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
    return [g * scale.to(g.dtype) for g in gradients]


def corrected_gradient(
    g: Tensor,
    state: State,
    *,
    betas: Betas,
    gamma: float,
    clip: float | None,
    last: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """Return the clipped, variance-reduced gradient (MARS, equation 4.2).

    c = g + kappa (g - h), with kappa = gamma b1 / (1 - b1). In approximate mode h is the gradient
    of the last step, which `state` keeps. In exact mode it is `last`: this batch's gradient at the
    last weights. At the first step h = g. In a stack of matrices, as of experts, h is taken as 0
    where g is exactly 0: an expert without tokens gets no correction.
    """
    h = state.get("last_grad", g)
    if last is not None and "last_grad" in state:
        h = last
    if g.ndim == 3 and len(g) > 1:
        h = h.where(g != 0, 0)
    state["last_grad"] = g.clone()
    c = g + gamma * betas[0] / (1 - betas[0]) * (g - h)
    if clip is not None:
        c = c * (clip / torch.linalg.vector_norm(c)).clamp(max=1.0)
    return c


def corrected_momentum(g: Tensor, state: State, *, betas: Betas, **settings: Any) -> Tensor:
    """Return the first moment of the corrected gradient, m <- b1 m + (1 - b1) c."""
    c = corrected_gradient(g, state, betas=betas, **settings)
    state["exp_avg"] = betas[0] * state.get("exp_avg", torch.zeros_like(g)) + (1 - betas[0]) * c
    return state["exp_avg"]


def orthogonal_direction(m: Tensor, options: Settings | None = None) -> Tensor:
    """Return each matrix of `m` with its singular values mapped near 1, as `options` say.

    `options` are the settings `orthogonalize`, `zero_mean` and `equilibrate` of matrix rules.
    Here `orthogonalize` may be "svd" too: the polar factor itself.
    """
    given = {"orthogonalize": "newton-schulz"} | (options or {})
    rows, cols = m.shape[-2:]
    if given.get("zero_mean"):
        m = m - m.mean(-2, keepdim=True)
    if given.get("equilibrate"):
        of_rows = torch.linalg.vector_norm(m, dim=-1, keepdim=True)
        m = m / of_rows.where(of_rows > 0, 1) * norm_of_each(m) / rows**0.5
    o = orthogonalized(m, given["orthogonalize"])
    return o * min(rows, cols) ** 0.5 / norm_of_each(o) if given.get("equilibrate") else o


def orthogonalized(m: Tensor, method: str) -> Tensor:
    """Return each matrix of `m` after the polynomials of `method`, or its polar factor."""
    if method == "svd":
        left, _, right = torch.linalg.svd(m, full_matrices=False)
        return left @ right
    iteration = ORTHOGONALIZERS[method]
    x = m / (iteration.margin * torch.linalg.vector_norm(m, dim=(-2, -1), keepdim=True) + 1e-7)
    for a, b, c in iteration.polynomials:
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def norm_of_each(m: Tensor) -> Tensor:
    """Return the Frobenius norm of each matrix, [..., 1, 1]; 1 of one that is 0."""
    norms = torch.linalg.vector_norm(m, dim=(-2, -1), keepdim=True)
    return norms.where(norms > 0, 1)


def descend(x: Tensor, direction: Tensor, *, lr: float, weight_decay: float, **_: Any) -> None:
    """Set x <- x - lr (direction + weight_decay x)."""
    x.sub_(lr * (direction + weight_decay * x))
