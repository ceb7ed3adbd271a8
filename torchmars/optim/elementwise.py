"""The passes of a step that work element by element, each on the flat local part of one tensor.

Two passes make a step: `inner_products` reads gradient and last gradient once for all norms, an update reads everything
once more and writes it. Both are plain torch; `compiled` fuses one into a single kernel, on CPU and GPU alike. Nothing waits
for the device: every factor is a 0-d tensor, in the dtype of the computation.

Names: g gradient, h last gradient, m and v moments, u the one buffer of a lean momentum; `scale` the factor of the global clip,
`clip` that of the tensor's own, `kappa` the strength of the correction, `ok` whether all gradients are finite (where it is false
nothing changes), `rate` one minus a beta.
"""

import functools
import shutil
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

COMPILE_FROM = 2**16  # elements; for less a kernel of its own does not pay
TOGETHER = 4  # tensors of one size in a call: calls cost time, and so does compiling long ones


def run_pass(function: Callable, tensors: Sequence[tuple[Tensor, ...]], factors: Sequence[dict[str, Any]], compile: bool) -> list[Any]:
    """`function(*tensors[i], **factors[i])` for each i; its results. With `compile`, large tensors go through fused kernels."""
    results: list[Any] = [None] * len(tensors)
    by_size: dict[int, list[int]] = {}
    for number, (first, *_) in enumerate(tensors):
        by_size.setdefault(first.numel() if compile else 0, []).append(number)
    for size, numbers in by_size.items():
        together = 1 if size < COMPILE_FROM or len(numbers) < TOGETHER else TOGETHER
        while numbers:
            now, numbers = (numbers[:together], numbers[together:]) if len(numbers) >= together else (numbers[:1], numbers[1:])
            call = _compiled(function) if size >= COMPILE_FROM else _each(function)
            for number, result in zip(now, call([tensors[i] for i in now], [factors[i] for i in now])):
                results[number] = result
    return results


def _each(function: Callable) -> Callable:
    return lambda tensors, factors: [function(*these, **their) for these, their in zip(tensors, factors)]


@functools.cache
def _compiled(function: Callable) -> Callable:
    return torch.compile(_each(function), dynamic=True)


def can_compile(device: torch.device) -> bool:
    """Whether torch.compile has what it needs: Triton on GPU, a C++ compiler on CPU."""
    return device.type == "cuda" or any(shutil.which(compiler) for compiler in ("g++", "c++", "clang++"))


def inner_products(g: Tensor, h: Tensor) -> Tensor:
    """[<g, g>, <g, h>, <h, h>] in float64, since the norm that follows from them cancels when kappa is large."""
    g, h = g.double(), h.double()
    return torch.stack([(g * g).sum(), (g * h).sum(), (h * h).sum()])


def squared_norm(g: Tensor) -> Tensor:
    """[<g, g>, 0, 0] in float64: what `inner_products` gives without a last gradient."""
    squared = torch.linalg.vector_norm(g, dtype=torch.promote_types(g.dtype, torch.float32)).double().square()
    return F.pad(squared[None], (0, 2))


def corrected_squared_norms(products: Tensor, scale: Tensor, kappa: Tensor) -> Tensor:
    """||c||^2 for c = s g + kappa (s g - h), from the products [n, 3] of `inner_products`; s is the scale, kappa is [n]."""
    gg, gh, hh = products.unbind(-1)
    return (((1 + kappa) * scale) ** 2 * gg - 2 * kappa * (1 + kappa) * scale * gh + kappa**2 * hh).clamp(min=0.0)


def adamw_(p: Tensor, g: Tensor, h: Tensor, m: Tensor, v: Tensor, scale: Tensor, clip: Tensor, kappa: Tensor, ok: Tensor,
           lr: Tensor, rate1: Tensor, rate2: Tensor, unbias1: Tensor, unbias2: Tensor, eps: Tensor, weight_decay: Tensor, keep: bool) -> None:
    """MARS-AdamW in place; `unbias` are the factors of the bias corrections. With `keep`, h becomes the gradient just used."""
    used, c = _correct(g, h, scale, clip, kappa)
    new_m, new_v = m + rate1 * (c - m), v + rate2 * (c * c - v)
    direction = new_m * unbias1 / ((new_v * unbias2).sqrt() + eps)
    x = p.to(c.dtype)
    _set(p, x - lr * (direction + weight_decay * x), ok)
    _set(m, new_m, ok)
    _set(v, new_v, ok)
    if keep:
        _set(h, used, ok)


def momentum_(g: Tensor, h: Tensor, m: Tensor, scale: Tensor, clip: Tensor, kappa: Tensor, ok: Tensor, rate1: Tensor,
              keep: bool) -> None:
    """The first moment of the corrected gradient, in place. With `keep`, h becomes the gradient just used."""
    used, c = _correct(g, h, scale, clip, kappa)
    _set(m, m + rate1 * (c - m), ok)
    if keep:
        _set(h, used, ok)


def lean_momentum_(g: Tensor, u: Tensor, scale: Tensor, ok: Tensor, decay: Tensor, weight: Tensor) -> None:
    """u <- decay u + weight g, in place: see `lean_coefficients`."""
    _set(u, decay * u.to(scale.dtype) + weight * (g * scale), ok)


def sign_(p: Tensor, m: Tensor, g: Tensor, out: Tensor, ok: Tensor, lr: Tensor, weight_decay: Tensor) -> None:
    """Lion's update in place: x <- x - lr (sign(m + out g) + weight_decay x); `out` is 0 for a full momentum m and holds the global clip's factor."""
    x = p.to(out.dtype)
    _set(p, x - lr * (torch.sign(m + out * g) + weight_decay * x), ok)


def _correct(g: Tensor, h: Tensor, scale: Tensor, clip: Tensor, kappa: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient after the global clip, and its clipped correction (MARS, arXiv 2411.10438, equation 4.2)."""
    used = g.to(scale.dtype) * scale
    return used, (used + kappa * (used - h.to(used.dtype))) * clip


def _set(old: Tensor, new: Tensor, ok: Tensor) -> None:
    old.copy_(torch.where(ok, new.to(old.dtype), old))


def lean_coefficients(rule: str, betas: tuple[float, float], gamma: float, gamma_next: float) -> tuple[float, float, float, float]:
    """(decay, weight, out, first) such that u <- decay u + weight g and m = u + out g is the rule's momentum.

    At the first step `first` is added to the weight. It holds without the per-tensor clip. For MARS in approximate form,
    m_t = b m_{t-1} + (1 - b) g_t + gamma_t b (g_t - g_{t-1}) has g_{t-1} drop out exactly if u_t = m_t - gamma_{t+1} g_t, so a schedule of
    gamma needs the next step's value. Lion and Nesterov's momentum are the same with gamma = 1 - b1 / b2 and 1 - mu.
    """
    beta1, beta2 = betas
    if rule == "lion":
        return beta2, (1 - beta2) * beta1 / beta2, 1 - beta1 / beta2, 0.0
    if rule == "muon":
        return beta1, beta1 * (1 - beta1), 1 - beta1, 0.0
    return beta1, 1 - beta1 + gamma * beta1 - gamma_next, gamma_next, -gamma * beta1
