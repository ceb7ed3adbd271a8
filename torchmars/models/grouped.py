"""Products of runs of rows with one matrix each, as an operation of its own.

torch's `grouped_mm` (2.11 to 2.15) cannot be traced in float32, and it has no count of FLOPs. This
operation can be traced in every dtype, so blocks compile.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from torchmars.core.device import is_gpu

ALIGNMENT = 16  # bytes: grouped_mm wants rows that begin at multiples of it


def grouped_mm(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Return `rows` [n, in] times the transposed matrices `weights` [groups, out, in]: [n, out].

    Matrix g multiplies the rows from `ends[g - 1]` to `ends[g]`, int32; the last end is n. A group
    may be empty: the gradient of its matrix is 0.
    """
    result: Tensor = product_op(rows, weights, ends)
    return result


@torch.library.custom_op("torchmars::grouped_mm", mutates_args=())
def product_op(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    if is_served(rows, weights.shape[1]):
        return F.grouped_mm(rows.contiguous(), weights.contiguous().mT, offs=ends)
    return torch.cat([part @ each.mT for part, each in zip(runs(rows, ends), weights, strict=True)])


@torch.library.custom_op("torchmars::grouped_mm_weights", mutates_args=())
def weights_op(gradient: Tensor, rows: Tensor, ends: Tensor) -> Tensor:
    """Return the gradient of the weights, from that of the product [n, out] and `rows` [n, in]."""
    if is_served(rows, gradient.shape[1]):
        found = F.grouped_mm(gradient.contiguous().mT, rows.contiguous(), offs=ends)
        if is_gpu(found.device.type):  # some kernels leave what was in memory: pytorch issue 172439
            empty = ends.diff(prepend=ends.new_zeros(1)) == 0
            found.masked_fill_(empty[:, None, None], 0.0)
        return found
    pairs = zip(runs(gradient, ends), runs(rows, ends), strict=True)
    return torch.stack([part.mT @ each for part, each in pairs])


def is_served(rows: Tensor, out: int) -> bool:
    """Return whether torch's `grouped_mm` takes such rows, and products of width `out`."""
    return rows.dtype != torch.float64 and all(
        width * rows.element_size() % ALIGNMENT == 0 for width in (rows.shape[1], out)
    )


def runs(rows: Tensor, ends: Tensor) -> list[Tensor]:
    """Return the rows of each group."""
    return list(rows.tensor_split(ends[:-1].tolist()))


@product_op.register_fake
def _(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(len(rows), weights.shape[1])


@weights_op.register_fake
def _(gradient: Tensor, rows: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(len(ends), gradient.shape[1], rows.shape[1])


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
    rows, weights, ends = ctx.saved_tensors
    return (
        product_op(gradient, weights.mT, ends),
        weights_op(gradient, rows, ends),
        None,
    )


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


product_op.register_autograd(_backward, setup_context=_keep)


@register_flop_formula([torch.ops.torchmars.grouped_mm, torch.ops.torchmars.grouped_mm_weights])
def _flops(first: tuple[int, int], second: tuple[int, ...], *_: Any, **__: Any) -> int:
    """Count 2 FLOPs for each row, input and output: `first` and `second` are the shapes."""
    return 2 * first[0] * first[1] * second[1]
