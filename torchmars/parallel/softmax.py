"""The element-wise part of the loss, compiled: it reads logits twice, and writes them once.

Both have no memory beside their arguments and results. Where a mode watches torch's operations,
they are operations of torch's own kind, so that a plan, which computes nothing, sees that too.
Elsewhere they are called as they are: torch's way there takes the host as long as they do.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def softmax_sums(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return each row's largest logit, and the sum of the exponentials of all less it; float32."""
    return _watched_sums(logits) if _is_watched() else _run(_sums, logits)


def softmax_gradient_(logits: Tensor, largest: Tensor, factor: Tensor, target: Tensor) -> None:
    """Set logits to exp(logits - largest) * factor, less 1 at each row's target.

    The other tensors have a number for each row. The target, an int32, may be -1: none.
    """
    if _is_watched():
        _watched_gradient_(logits, largest, factor, target)
    else:
        _run(_gradient_, logits, largest, factor, target)


def _is_watched() -> bool:
    """Return whether a mode observes or replaces torch's operations."""
    return torch._C._len_torch_dispatch_stack() > 0  # private, torch 2.11 to 2.15


@torch.library.custom_op("torchmars::softmax_sums", mutates_args=())
def _watched_sums(logits: Tensor) -> tuple[Tensor, Tensor]:
    return _run(_sums, logits)


@_watched_sums.register_fake
def _(logits: Tensor) -> tuple[Tensor, Tensor]:
    largest = logits.new_empty(len(logits), dtype=torch.float32)
    return largest, torch.empty_like(largest)


@torch.library.custom_op("torchmars::softmax_gradient_", mutates_args={"logits"})
def _watched_gradient_(logits: Tensor, largest: Tensor, factor: Tensor, target: Tensor) -> None:
    _run(_gradient_, logits, largest, factor, target)


@_watched_gradient_.register_fake
def _(logits: Tensor, largest: Tensor, factor: Tensor, target: Tensor) -> None: ...


def _sums(logits: Tensor) -> tuple[Tensor, Tensor]:
    # In this form, with both dims kept, torch's compiler knows how to read once on a GPU.
    values = logits.float()
    largest = values.amax(-1, keepdim=True)
    total = (values - largest).exp().sum(-1, keepdim=True)
    return largest[:, 0], total[:, 0]


def _gradient_(logits: Tensor, largest: Tensor, factor: Tensor, target: Tensor) -> None:
    columns = torch.arange(logits.shape[1], dtype=target.dtype, device=logits.device)
    softmax = (logits.float() - largest[:, None]).exp() * factor[:, None]
    logits.copy_(softmax - (columns == target[:, None]).float())


def _run(kernel: Callable[..., Any], *tensors: Tensor) -> Any:
    """Call a compiled kernel. All numbers of rows share one."""
    for tensor in tensors:
        torch._dynamo.maybe_mark_dynamic(tensor, 0)
    return _compiled(kernel)(*tensors)


@functools.cache
def _compiled(kernel: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(kernel, fullgraph=True)
