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
import logging
import os
import shutil
import sysconfig
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

logger = logging.getLogger(__name__)

COMPILE_FROM = 2**16  # elements; for less a kernel of its own does not pay
TOGETHER = 4  # tensors of one size in a call: calls cost time, and so does compiling long ones

Tensors = Sequence[tuple[Tensor, ...]]
Factors = Sequence[dict[str, Any]]


def run_pass(
    function: Callable[[Tensors, Factors], Any], tensors: Tensors, factors: Factors, compile: bool
) -> list[Any]:
    """`function` on all `tensors` with their `factors`; its results. With `compile`, large tensors go through fused kernels."""
    results: list[Any] = [None] * len(tensors)
    by_size: dict[int, list[int]] = {}
    for number, (first, *_) in enumerate(tensors):
        by_size.setdefault(
            first.numel() if compile and first.numel() >= COMPILE_FROM else 0, []
        ).append(number)
    for size, numbers in by_size.items():
        call = _compiled(function) if size else function
        while numbers:
            together = TOGETHER if len(numbers) >= TOGETHER else 1
            now, numbers = numbers[:together], numbers[together:]
            for number, result in zip(
                now, call([tensors[i] for i in now], [factors[i] for i in now]) or ()
            ):
                results[number] = result
    return results


@functools.cache
def _compiled(function: Callable) -> Callable:
    _announce_compilation()
    return torch.compile(function, dynamic=True)


@functools.cache
def _announce_compilation() -> None:
    """Say once why the first step takes so long; on one rank only."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        logger.warning(
            "compiling the optimizer's kernels: the first step takes some seconds "
            "longer; MARS(..., compile=False) does without"
        )


def can_compile(device: torch.device) -> bool:
    """Whether torch.compile has what it needs: a compiler, and the headers of Python on CPU or a GPU that Triton knows."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (7, 0) and any(
            map(shutil.which, ("gcc", "cc", "clang"))
        )
    return os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")) and any(
        map(shutil.which, ("g++", "c++", "clang++"))
    )


def inner_products(tensors: Tensors, factors: Factors) -> list[Tensor]:
    """[<g, g>, <g, h>, <h, h>] of each (g, h), in float64, since the norm that follows from them cancels when kappa is large."""
    result = []
    for g, h in tensors:
        g, h = g.double(), h.double()
        result.append(torch.stack([(g * g).sum(), (g * h).sum(), (h * h).sum()]))
    return result


def squared_norms(tensors: Tensors, factors: Factors) -> list[Tensor]:
    """[<g, g>, 0, 0] of each (g,) in float64: what `inner_products` gives without a last gradient."""
    return [
        F.pad(torch.linalg.vector_norm(g, dtype=torch.float64).square()[None], (0, 2))
        for (g,) in tensors
    ]


def corrected_squared_norms(products: Tensor, scale: Tensor, kappa: Tensor) -> Tensor:
    """||c||^2 for c = s g + kappa (s g - h), from the products [n, 3] of `inner_products`; s is the scale, kappa is [n]."""
    gg, gh, hh = products.unbind(-1)
    return (
        ((1 + kappa) * scale) ** 2 * gg - 2 * kappa * (1 + kappa) * scale * gh + kappa**2 * hh
    ).clamp(min=0.0)


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
    """Lion on each (p, u, g) in place: the sign of mix u + out g, then `lean_momentum_`."""
    for (p, u, g), f in zip(tensors, factors):
        used, wide = g.to(f["scale"].dtype) * f["scale"], u.to(f["scale"].dtype)
        _sign(p, f["mix"] * wide + f["out"] * used, f)
        _set(u, f["decay"] * wide + f["weight"] * used, f["ok"])


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


class Lean(NamedTuple):
    """A momentum that follows from one buffer u and the gradient g alone.

    The update takes the direction of mix u + out g, and then u <- decay u + weight g. At the first
    step `first` is added to `out` and to `weight`.
    """

    mix: float
    out: float
    decay: float
    weight: float
    first: float = 0.0


def lean_coefficients(rule: str, betas: Sequence[float], gamma: float, gamma_next: float) -> Lean:
    """The coefficients of one step; exact whatever betas and gamma did before, without a clip.

    Lion (Chen et al., arXiv 2302.06675, algorithm 2) keeps u = m, the moving average of g. Muon
    (Moonlight's form, arXiv 2502.16982) keeps u = B, with B_t = mu B_{t-1} + g_t and the direction
    of g_t + mu B_t, here times 1 - mu, so that it is of the gradient's size. For MARS in
    approximate form, m_t = b m_{t-1} + (1 - b) g_t + gamma_t b (g_t - g_{t-1}) has g_{t-1} drop out
    exactly if u_t = m_t - gamma_{t+1} g_t, so a schedule of gamma needs the next step's value.
    """
    beta1, beta2 = betas
    if rule == "lion":
        return Lean(mix=beta1, out=1 - beta1, decay=beta2, weight=1 - beta2)
    if rule == "muon":
        return Lean(
            mix=(1 - beta1) * beta1**2, out=(1 - beta1) * (1 + beta1), decay=beta1, weight=1.0
        )
    out = 1 - beta1 + gamma * beta1
    return Lean(mix=beta1, out=out, decay=beta1, weight=out - gamma_next, first=-gamma * beta1)
