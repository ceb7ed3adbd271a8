"""Kernels: functions on lists of flat local tensors, fused by torch.compile on CPU and GPU alike.

A step runs two for each tensor. The first reads gradient and last gradient for all norms. The
rule's own reads everything once more and writes it. Nothing waits for the device: every factor is a
0-d tensor in the dtype of the computation.
"""

import functools
import importlib
import logging
import os
import shutil
import sysconfig
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from torchmars.optim.rules.correction import write_if

logger = logging.getLogger(__name__)

# Elements of a tensor. A kernel of its own does not pay for a smaller one.
MIN_TENSOR_TO_COMPILE = 2**16
# Local elements of all parameters. A smaller model trains faster than its kernels compile.
MIN_MODEL_TO_COMPILE = 2**22
# Tensors of one shape in a call. Calls cost time, and so does compiling long ones.
TENSORS_PER_CALL = 4

Tensors = Sequence[tuple[Tensor, ...]]
Factor = TypeVar("Factor")


def run_kernel(
    kernel: Callable[[Tensors, Sequence[Factor]], list[Tensor] | None],
    tensors: Tensors,
    factors: Sequence[Factor],
    compile: bool,
) -> list[Any]:
    """Call `kernel` on all `tensors` with their `factors`, and return its results in order.

    With `compile`, large tensors go through the compiled one. It is cached by `kernel`, which must
    be the same object at every step: define it at the top level of a module.
    """
    results: list[Any] = [None] * len(tensors)
    by_shape: dict[tuple[int, ...], list[int]] = {}
    for number, (first, *_) in enumerate(tensors):
        large = compile and first.numel() >= MIN_TENSOR_TO_COMPILE
        by_shape.setdefault(tuple(first.shape) if large else (), []).append(number)
    for shape, numbers in by_shape.items():
        call = _compiled(kernel) if shape else kernel
        while numbers:
            count = TENSORS_PER_CALL if len(numbers) >= TENSORS_PER_CALL else 1
            batch, numbers = numbers[:count], numbers[count:]
            returned = call([tensors[i] for i in batch], [factors[i] for i in batch])
            for number, result in zip(batch, returned or ()):
                results[number] = result
    return results


@functools.cache
def _compiled(kernel: Callable) -> Callable:
    _announce_compilation()
    return torch.compile(kernel, dynamic=True)


@functools.cache
def _announce_compilation() -> None:
    """Say once why the first step takes so long; on one rank only."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        logger.warning(
            "compiling the optimizer's kernels: the first step takes some seconds "
            "longer; MARS(..., compile=False) does without"
        )


def pays_to_compile(tensors: Iterable[Tensor], device: torch.device) -> bool:
    """Return whether a model of these local tensors trains faster with compiled kernels."""
    return sum(each.numel() for each in tensors) >= MIN_MODEL_TO_COMPILE and can_compile(device)


def can_compile(device: torch.device) -> bool:
    """Return whether torch.compile has what it needs.

    It needs a compiler and the headers of Python: for its own code on a CPU, and for Triton's
    driver on a GPU, which must be one that Triton supports.
    """
    on_gpu = device.type == "cuda"
    compilers = ("gcc", "cc", "clang") if on_gpu else ("g++", "c++", "clang++")
    header = os.path.join(sysconfig.get_path("include"), "Python.h")
    if not (os.path.exists(header) and any(map(shutil.which, compilers))):
        return False
    return not on_gpu or torch.cuda.get_device_capability(device) >= (7, 0) and has_triton()


def has_triton() -> bool:
    """Return whether Triton can be imported."""
    try:
        importlib.import_module("triton")
    except Exception:  # whatever a broken installation raises
        return False
    return True


def inner_products(tensors: Tensors, factors: Sequence[None]) -> list[Tensor]:
    """Return [<g, g>, <g, h>, <h, h>] of each (g, h), in float64.

    The norm that follows from them cancels when kappa is large, hence the float64.
    """
    result = []
    for g, h in tensors:
        g, h = _double(g), _double(h)
        result.append(torch.stack([(g * g).sum(), (g * h).sum(), (h * h).sum()]))
    return result


def _double(values: Tensor) -> Tensor:
    """Return `values` in float64, by way of float32: compiled code is then vectorised."""
    return values.to(torch.promote_types(values.dtype, torch.float32)).double()


def squared_norms(tensors: Tensors, factors: Sequence[None]) -> list[Tensor]:
    """Return [<g, g>, 0, 0] of each (g,), in float64, without memory beside g when not compiled."""
    return [
        F.pad(torch.linalg.vector_norm(g, dtype=torch.float64).square()[None], (0, 2))
        for (g,) in tensors
    ]


class KeepFactors(NamedTuple):
    """The factors of one tensor's `keep_gradient_`."""

    scale: Tensor
    """The factor of the global clip, s."""
    applied: Tensor
    """`StepFactors.applied`."""


def keep_gradient_(tensors: Tensors, factors: Sequence[KeepFactors]) -> None:
    """Set h to s g on each (g, h), in place."""
    for (g, h), f in zip(tensors, factors):
        write_if(f.applied, h, g.to(f.scale.dtype) * f.scale)


def pays_to_keep_apart(last_grad: Tensor, momentum: Tensor) -> bool:
    """Return whether a compiled kernel that reads h had better leave it to another to write h.

    On a CPU torch.compile writes 16-bit numbers by masked stores of half a vector. The next load
    from there waits until the store is done, and with it all that the loop computes: a step took
    twice as long. A kernel that writes a momentum of 16 bits waits anyway, and was faster with
    both.
    """
    on_cpu = last_grad.device.type == "cpu"
    return on_cpu and last_grad.element_size() == 2 and momentum.element_size() > 2
