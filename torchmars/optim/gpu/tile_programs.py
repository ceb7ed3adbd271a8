"""Matrices between an optimizer and an exchange, as Triton kernels: packed, and stepped along.

A program has a piece of a tile: its row, its first element there and in the values at the address
`packed`, its length, and what the direction is scaled by, as the bits of a float64.
"""

import triton
import triton.language as tl

from torchmars.optim.gpu.programs import (
    APPLIED,
    BLOCK,
    DECAY,
    FACTORS,
    FIRST,
    GROUP,
    HEADER,
    LR,
    MIX,
    OF_OUT,
    PRODUCTS,
    SCALE,
    SLOTS,
    WEIGHT,
    _address,
    _elements_hinted,
    _float,
    _read,
    _setting,
    _write,
)

COLUMNS = tl.constexpr(5)


@triton.jit
def _tile(pieces, packed, dtype: tl.constexpr):
    """Return a piece's row, its first element, its length, and where its packed values are."""
    piece = pieces + tl.program_id(0).to(tl.int64) * COLUMNS
    size: tl.constexpr = dtype.primitive_bitwidth // 8
    values = packed + tl.load(piece + 2) * size
    return tl.load(piece), tl.load(piece + 1), tl.load(piece + 3).to(tl.int32), values


@triton.jit(do_not_specialize=["packed", "count"])
def pack(table, fresh, pieces, numbers, packed, count, form: tl.constexpr):
    """Write the matrices to orthogonalise to the packed values: the momentum, or a lean direction.

    `form` has the dtypes of the momentum, of the gradient (None: of a momentum), and of the values.
    """
    row, start, length, values = _tile(pieces, packed, form[2])
    moment = _address(table + FIRST * count + row, start, form[0])
    grad = _address(fresh + row, start, form[1])
    group = fresh + count + tl.load(table + GROUP * count + row) * SLOTS
    mix, scale = _setting(group + MIX), _float(numbers + SCALE)
    out = _float(numbers + HEADER + count * PRODUCTS + row * FACTORS + OF_OUT)
    applied = tl.load(numbers + APPLIED) != 0
    f = (mix, out, scale, applied)
    hinted = _elements_hinted(moment | grad | values, length)
    for offset in range(0, hinted, BLOCK):
        _pack_block(moment, grad, values, f, offset, length, form, True)
    for offset in range(hinted, length, BLOCK):
        _pack_block(moment, grad, values, f, offset, length, form, False)


@triton.jit
def _pack_block(moment, grad, values, f, offset, length, form: tl.constexpr, full: tl.constexpr):
    m = _read(moment, offset, length, form[0], full)
    if form[1] is not None:
        g = _read(grad, offset, length, form[1], full)
        m = f[0] * m + f[1] * (f[2] * tl.where(f[3], g, 0.0))
    _write(values, offset, m, length, form[2], full)


@triton.jit(do_not_specialize=["packed", "count"])
def step_along(table, fresh, pieces, numbers, packed, count, form: tl.constexpr):
    """Step along the directions in the packed values, if the step is applied.

    `form` has the dtypes of the weight and of the values.
    """
    if tl.load(numbers + APPLIED) != 0:
        row, start, length, values = _tile(pieces, packed, form[1])
        weight = _address(table + WEIGHT * count + row, start, form[0])
        group = fresh + count + tl.load(table + GROUP * count + row) * SLOTS
        lr = _setting(group + LR)
        keep = 1 - lr * _setting(group + DECAY)
        scaled = lr * _setting(pieces + tl.program_id(0).to(tl.int64) * COLUMNS + 4)
        f = (keep, scaled)
        hinted = _elements_hinted(weight | values, length)
        for offset in range(0, hinted, BLOCK):
            _step_block(weight, values, f, offset, length, form, True)
        for offset in range(hinted, length, BLOCK):
            _step_block(weight, values, f, offset, length, form, False)


@triton.jit
def _step_block(weight, values, f, offset, length, form: tl.constexpr, full: tl.constexpr):
    x = _read(weight, offset, length, form[0], full)
    d = _read(values, offset, length, form[1], full)
    _write(weight, offset, x * f[0] - f[1] * d, length, form[0], full)
