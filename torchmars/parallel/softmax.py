"""The element-wise part of the loss, compiled: it reads logits twice, and writes them once.

Both operations have no memory beside their arguments and results. They are operations of torch's
own kind, so that a plan, which computes nothing, sees that too.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


@torch.library.custom_op("torchmars::softmax_sums", mutates_args=())
def softmax_sums(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return each row's largest logit, and the sum of the exponentials of all less it; float32."""
    return _run(_sums, logits)


@softmax_sums.register_fake
def _(logits: Tensor) -> tuple[Tensor, Tensor]:
    largest = logits.new_empty(len(logits), dtype=torch.float32)
    return largest, torch.empty_like(largest)


@torch.library.custom_op("torchmars::softmax_gradient_", mutates_args={"logits"})
def softmax_gradient_(logits: Tensor, largest: Tensor, factor: Tensor, target: Tensor) -> None:
    """Set logits to exp(logits - largest) * factor, less 1 at each row's target.

    The other tensors have a number for each row. The target, an int32, may be -1: none.
    """
    _run(_gradient_, logits, largest, factor, target)


@softmax_gradient_.register_fake
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
