"""The passes of a step that work element by element, on the flat local parts of tensors.

Two passes make a step: `inner_products` reads gradient and last gradient once for all norms, an update reads everything
once more and writes it. Both are plain torch on lists; `run_pass` has them fused into kernels, on CPU and GPU alike. Nothing
waits for the device: every factor is a 0-d tensor, in the dtype of the computation.

Names: g gradient, h last gradient, m and v moments, u the one buffer of a lean momentum; `scale` the factor of the global clip,
`clip` that of the tensor's own, `kappa` the strength of the correction, `ok` whether the step
counts (where it is false nothing changes), `unusable` whether h is no number to correct by (kappa
is 0 then), `rate` one minus a beta.
"""

import functools
import os
import shutil
import sysconfig
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

COMPILE_FROM = 2**16  # elements; for less a kernel of its own does not pay
TOGETHER = 4  # tensors of one size in a call: calls cost time, and so does compiling long ones

Tensors = Sequence[tuple[Tensor, ...]]
Factors = Sequence[dict[str, Any]]


def run_pass(function: Callable[[Tensors, Factors], Any], tensors: Tensors, factors: Factors, compile: bool) -> list[Any]:
    """`function` on all `tensors` with their `factors`; its results. With `compile`, large tensors go through fused kernels."""
    results: list[Any] = [None] * len(tensors)
    by_size: dict[int, list[int]] = {}
    for number, (first, *_) in enumerate(tensors):
        by_size.setdefault(first.numel() if compile and first.numel() >= COMPILE_FROM else 0, []).append(number)
    for size, numbers in by_size.items():
        call = _compiled(function) if size else function
        while numbers:
            together = TOGETHER if len(numbers) >= TOGETHER else 1
            now, numbers = numbers[:together], numbers[together:]
            for number, result in zip(now, call([tensors[i] for i in now], [factors[i] for i in now]) or ()):
                results[number] = result
    return results


@functools.cache
def _compiled(function: Callable) -> Callable:
    return torch.compile(function, dynamic=True)


def can_compile(device: torch.device) -> bool:
    """Whether torch.compile has what it needs: a compiler, and the headers of Python on CPU or a GPU that Triton knows."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (7, 0) and any(map(shutil.which, ("gcc", "cc", "clang")))
    return os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")) and any(map(shutil.which, ("g++", "c++", "clang++")))


def inner_products(tensors: Tensors, factors: Factors) -> list[Tensor]:
    """[<g, g>, <g, h>, <h, h>] of each (g, h), in float64, since the norm that follows from them cancels when kappa is large."""
    result = []
    for g, h in tensors:
        g, h = g.double(), h.double()
        result.append(torch.stack([(g * g).sum(), (g * h).sum(), (h * h).sum()]))
    return result


def squared_norms(tensors: Tensors, factors: Factors) -> list[Tensor]:
    """[<g, g>, 0, 0] of each (g,) in float64: what `inner_products` gives without a last gradient."""
    return [F.pad(torch.linalg.vector_norm(g, dtype=torch.float64).square()[None], (0, 2)) for g, in tensors]


def corrected_squared_norms(products: Tensor, scale: Tensor, kappa: Tensor) -> Tensor:
    """||c||^2 for c = s g + kappa (s g - h), from the products [n, 3] of `inner_products`; s is the scale, kappa is [n]."""
    gg, gh, hh = products.unbind(-1)
    return (((1 + kappa) * scale) ** 2 * gg - 2 * kappa * (1 + kappa) * scale * gh + kappa**2 * hh).clamp(min=0.0)


def adamw_(tensors: Tensors, factors: Factors) -> None:
    """MARS-AdamW on each (p, g, h, m, v) in place; `unbias` are the factors of the bias corrections. With `keep`, h becomes the
    gradient just used."""
    for (p, g, h, m, v), f in zip(tensors, factors):
        used, c = _correct(g, h, f)
        new_m, new_v = m + f["rate1"] * (c - m), v + f["rate2"] * (c * c - v)
        direction = new_m * f["unbias1"] / ((new_v * f["unbias2"]).sqrt() + f["eps"])
        x = p.to(c.dtype)
        _set(p, x - f["lr"] * (direction + f["weight_decay"] * x), f["ok"])
        _set(m, new_m, f["ok"])
        _set(v, new_v, f["ok"])
        if f["keep"]:
            _set(h, used, f["ok"])


def momentum_(tensors: Tensors, factors: Factors) -> None:
    """The first moment of the corrected gradient, on each (m, g, h) in place. With `keep`, h becomes the gradient just used."""
    for (m, g, h), f in zip(tensors, factors):
        used, c = _correct(g, h, f)
        _set(m, m + f["rate1"] * (c - m), f["ok"])
        if f["keep"]:
            _set(h, used, f["ok"])


def lion_(tensors: Tensors, factors: Factors) -> None:
    """MARS-Lion on each (p, g, h, m) in place: `momentum_`, then x <- x - lr (sign(m) + weight_decay x)."""
    for (p, g, h, m), f in zip(tensors, factors):
        used, c = _correct(g, h, f)
        new_m = m + f["rate1"] * (c - m)
        _sign(p, new_m, f)
        _set(m, new_m, f["ok"])
        if f["keep"]:
            _set(h, used, f["ok"])


def lean_momentum_(tensors: Tensors, factors: Factors) -> None:
    """u <- decay u + weight g on each (u, g), in place: see `lean_coefficients`."""
    for (u, g), f in zip(tensors, factors):
        _set(u, f["decay"] * u.to(f["scale"].dtype) + f["weight"] * (g * f["scale"]), f["ok"])


def lean_lion_(tensors: Tensors, factors: Factors) -> None:
    """Lion on each (p, u, g) in place: `lean_momentum_`, then the sign of u + out g."""
    for (p, u, g), f in zip(tensors, factors):
        used = g.to(f["scale"].dtype) * f["scale"]
        new_u = f["decay"] * u + f["weight"] * used
        _sign(p, new_u + f["out"] * used, f)
        _set(u, new_u, f["ok"])


def _sign(p: Tensor, momentum: Tensor, f: dict[str, Any]) -> None:
    x = p.to(momentum.dtype)
    _set(p, x - f["lr"] * (torch.sign(momentum) + f["weight_decay"] * x), f["ok"])


def _correct(g: Tensor, h: Tensor, f: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The gradient after the global clip, and its clipped correction (MARS, arXiv 2411.10438, equation 4.2)."""
    used = g.to(f["scale"].dtype) * f["scale"]
    last = torch.where(f["unusable"], used, h.to(used.dtype))
    return used, (used + f["kappa"] * (used - last)) * f["clip"]


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
