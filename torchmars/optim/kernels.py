"""Kernels: functions on lists of flat local tensors, fused by torch.compile on CPU and GPU alike.

A step runs two for each tensor. The first reads gradient and last gradient for all norms. The
rule's own reads everything once more and writes it. Nothing waits for the device: every factor is a
tensor in the dtype of the computation.
"""

import functools
import importlib
import itertools
import logging
import os
import shutil
import sysconfig
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from torchmars.optim.rules.correction import write_if
from torchmars.optim.rules.factors import Factors, split_factors

logger = logging.getLogger(__name__)

# Local elements of all parameters. A smaller model trains faster than its kernels compile.
MIN_MODEL_TO_COMPILE = 2**22

# Parts of a tensor that is added up on a GPU: some for each of its processors.
GPU_PARTS = 1024

Tensors = Sequence[tuple[Tensor, ...]]


class Calls(NamedTuple):
    """The inputs of a compiled call on a type of device."""

    min_elements: int
    """Of a tensor. On a CPU a kernel of its own does not pay for a smaller one. A GPU launches a
    kernel for each operation where they are not compiled."""
    max_tensors: int
    """A call costs the host about as much as four tensors do. A CPU has that time, and long calls
    compile slowly there."""


CALLS = defaultdict(lambda: Calls(2**16, 4), cuda=Calls(2, 16))


def run_kernel(
    kernel: Callable[[Tensors, Factors], Tensor | None],
    tensors: Tensors,
    factors: Factors,
    compile: bool,
) -> list[Tensor]:
    """Call `kernel` on all `tensors` with their `factors`, and return the results of its calls.

    With `compile`, large tensors go through the compiled kernel, neighbours of one length together.
    It is cached by `kernel`, which must be the same object at every step: define it at the top
    level of a module.
    """
    calls = list(_calls([first for first, *_ in tensors], compile))
    counts = [count for count, _ in calls]
    results: list[Any] = []
    start = 0
    for (count, compiled), of_call in zip(calls, split_factors(factors, counts)):
        call = _compiled(kernel) if compiled else kernel
        results.append(call(tensors[start : start + count], of_call))
        start += count
    return results


def _calls(tensors: Sequence[Tensor], compile: bool) -> Iterator[tuple[int, bool]]:
    """Yield how many of the `tensors` go into each call, and whether it is compiled."""

    def length_to_compile(tensor: Tensor) -> int | None:
        long = compile and tensor.numel() >= CALLS[tensor.device.type].min_elements
        return tensor.numel() if long else None

    for length, alike in itertools.groupby(tensors, length_to_compile):
        first, *others = alike
        left = 1 + len(others)
        calls = 1 if length is None else -(-left // CALLS[first.device.type].max_tensors)
        while calls:  # as even as can be: a kernel compiles once for each count
            count = -(-left // calls)
            yield count, length is not None
            left, calls = left - count, calls - 1


@functools.cache
def _compiled(kernel: Callable) -> Callable:
    announce_compilation()
    # What is asserted is so of every flat tensor, and took a fifth of a call.
    return torch.compile(kernel, dynamic=True, options={"size_asserts": False})


@functools.cache
def announce_compilation() -> None:
    """Say once why the first step takes so long; on one rank only."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        logger.warning(
            "compiling the optimizer's kernels: the first step takes some seconds longer. "
            "compile=False does without; in a config it is training.compile = false"
        )


def pays_to_compile(tensors: Iterable[Tensor], device: torch.device) -> bool:
    """Return whether a model of these local tensors trains faster with compiled kernels."""
    return sum(each.numel() for each in tensors) >= MIN_MODEL_TO_COMPILE and can_compile(device)


def can_compile(device: torch.device) -> bool:
    """Return whether torch.compile can work here.

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


def inner_products(tensors: Tensors, factors: None) -> Tensor:
    """Return <g, g>, <g, h> and <h, h> of each (g, h), [n, 3] in float64.

    The norm that follows from them cancels when kappa is large, hence the float64.
    """
    partial = []
    for g, h in tensors:
        g, h = _double(g), _double(h)
        partial += [_partial_sums(each) for each in (g * g, g * h, h * h)]
    return torch.stack(partial).sum(-1).view(-1, 3)


def inner_products_of_stacks(tensors: Tensors, factors: None) -> Tensor:
    """Return the `inner_products` of each (g, h) where h is taken as 0 wherever g is exactly 0."""
    return inner_products([(g, h.where(g != 0, 0)) for g, h in tensors], factors)


def _partial_sums(values: Tensor) -> Tensor:
    """Return sums of parts of `values`, of which there are as many whatever its length.

    A GPU adds up all tensors in one kernel, and has one more for each tensor, which gives work to
    all of it.
    """
    if values.is_cpu:
        return values.sum()[None]
    return F.pad(values, (0, -len(values) % GPU_PARTS)).view(GPU_PARTS, -1).sum(-1)


def _double(values: Tensor) -> Tensor:
    """Return `values` in float64, by way of float32: compiled code is then vectorised."""
    return values.to(torch.promote_types(values.dtype, torch.float32)).double()


def squared_norms(tensors: Tensors, factors: None) -> Tensor:
    """Return <g, g>, 0 and 0 of each (g,), [n, 3] in float64. Not for torch.compile on GPUs."""
    grads = [g for (g,) in tensors]
    if grads[0].is_cpu:
        norms = [torch.linalg.vector_norm(g, dtype=torch.float64) for g in grads]
    else:
        norms = list(torch._foreach_norm(grads, 2, torch.float64))
    return F.pad(torch.stack(norms).square()[:, None], (0, 2))


class KeepFactors(NamedTuple):
    """The factors of `keep_gradient_`."""

    scale: Tensor
    """The factor of the global clip, s."""
    applied: Tensor
    """`StepFactors.applied`."""


def keep_gradient_(tensors: Tensors, factors: KeepFactors) -> None:
    """Set h to s g on each (g, h), in place."""
    for g, h in tensors:
        write_if(factors.applied, h, g.to(factors.scale.dtype) * factors.scale)


def pays_to_keep_apart(last_grad: Tensor, momentum: Tensor) -> bool:
    """Return whether writing h in a kernel of its own is faster.

    On a CPU torch.compile writes 16-bit numbers by masked stores of half a vector. The next load
    from there waits until the store is done, and the loop with it: a step took twice as long. A
    kernel that writes a momentum of 16 bits waits anyway, and was faster with both.
    """
    on_cpu = last_grad.device.type == "cpu"
    return on_cpu and last_grad.element_size() == 2 and momentum.element_size() > 2
