"""The GPU's programs: Triton kernels over a table of all tensors, in the order of a step.

The two passes have a program for each piece of a tensor. Between them the sums are settled, and all
that follows from them for each tensor. The arithmetic is that of the functions on tensors in
`optim/rules`, `optim/kernels.py` and `optim/reduction.py`, which say what it means: tests hold both
equal.
"""

import triton
import triton.language as tl

# Elements of a piece, and those that a program reads at once.
PIECE, BLOCK = tl.constexpr(2**14), tl.constexpr(2**10)
# Rows that a program settles at once.
ROWS = tl.constexpr(256)

# The columns of a table. `FIRST` is the first buffer of the state, `SECOND` the second moment. A
# group's number is 0 for a parameter without gradient. `BEGIN` and `END` are the row's pieces.
WEIGHT, FIRST, SECOND, LAST, STEP = (tl.constexpr(column) for column in range(5))
LENGTH, STACK, GROUP, BEGIN, END = (tl.constexpr(column) for column in range(5, 10))

# The settings of a group, as `kernel_step.group_settings` lists them. The first
# row of them is of no group: it has the norm to clip to instead of lr.
LR, DECAY, EPS, RATE1, RATE2 = (tl.constexpr(slot) for slot in range(5))
LOG1, LOG2, KAPPA, CLIP = (tl.constexpr(slot) for slot in range(5, 9))
MIX, OUT, KEEP, ADD, EXTRA = (tl.constexpr(slot) for slot in range(9, 14))
SLOTS = tl.constexpr(14)

# The numbers of a step, float64: these, the products of each row, and results for each row.
TOTAL, NORM, SCALE, APPLIED = (tl.constexpr(number) for number in range(4))
HEADER, PRODUCTS = tl.constexpr(8), tl.constexpr(3)
OF_KAPPA, OF_CLIP, UNUSABLE, UNBIAS1, UNBIAS2 = (tl.constexpr(column) for column in range(5))
OF_OUT, OF_ADD, FACTORS = (tl.constexpr(column) for column in range(5, 8))


@triton.jit
def _piece(table, pieces, piece, count):
    """Return the row of a piece, its first element, and how many it has."""
    row, start = tl.load(pieces + 2 * piece), tl.load(pieces + 2 * piece + 1)
    left = tl.load(table + LENGTH * count + row) - start
    return row, start, tl.minimum(left, PIECE).to(tl.int32)


@triton.jit
def _elements_hinted(addresses, length):
    """Return how many elements are read and written as 16 bytes: full blocks, of aligned pieces.

    A hint on another address would kill the run. Gradients are views at any offset.
    """
    return tl.where(addresses % 16 == 0, length // BLOCK * BLOCK, 0)


@triton.jit
def _pointers(address, offset, dtype: tl.constexpr, full: tl.constexpr):
    if full:
        # The hint is on the pointer: on the address it would hold for the plain path too.
        pointer = address.to(tl.pointer_type(dtype))
        return tl.multiple_of(pointer, 16) + (tl.multiple_of(offset, BLOCK) + tl.arange(0, BLOCK))
    else:
        return address.to(tl.pointer_type(dtype)) + (offset + tl.arange(0, BLOCK))


@triton.jit
def _read(address, offset, length, dtype: tl.constexpr, full: tl.constexpr):
    pointers = _pointers(address, offset, dtype, full)
    if full:
        return tl.load(pointers).to(tl.float32)
    else:
        mask = offset + tl.arange(0, BLOCK) < length
        return tl.load(pointers, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _write(address, offset, values, length, dtype: tl.constexpr, full: tl.constexpr):
    pointers = _pointers(address, offset, dtype, full)
    if full:
        tl.store(pointers, values.to(dtype))
    else:
        tl.store(pointers, values.to(dtype), mask=offset + tl.arange(0, BLOCK) < length)


@triton.jit(do_not_specialize=["count", "first"])
def inner_products(table, fresh, pieces, partial, count, first, form: tl.constexpr):
    """Write <g, g>, <g, h> and <h, h> of each piece from the `first` on; without h it is 0.

    `form` has the dtypes of g and h, and whether sums are of float64. Else they are of two floats:
    for GPUs whose float64 takes longer than their memory.
    """
    piece = first + tl.program_id(0)
    row, start, length = _piece(table, pieces, piece, count)
    last = tl.load(table + LAST * count + row)
    stack = tl.load(table + STACK * count + row) != 0
    g_at = tl.load(fresh + row) + start * (form[0].primitive_bitwidth // 8)
    h_at = last + start * (form[1].primitive_bitwidth // 8)
    hinted = _elements_hinted(g_at | tl.where(last != 0, h_at, 0), length)
    gg, gh, hh = _zero(form[2]), _zero(form[2]), _zero(form[2])
    for offset in range(0, hinted, BLOCK):
        g = _read(g_at, offset, length, form[0], True)
        h_pointers = _pointers(h_at, offset, form[1], True)
        h = tl.load(h_pointers, mask=last != 0, other=0.0).to(tl.float32)
        h = tl.where(g == 0, tl.where(stack, 0.0, h), h)
        gg, gh, hh = _add(gg, g, g, form[2]), _add(gh, g, h, form[2]), _add(hh, h, h, form[2])
    for offset in range(hinted, length, BLOCK):
        g = _read(g_at, offset, length, form[0], False)
        h = _read(h_at, offset, tl.where(last != 0, length, 0), form[1], False)
        h = tl.where(g == 0, tl.where(stack, 0.0, h), h)
        gg, gh, hh = _add(gg, g, g, form[2]), _add(gh, g, h, form[2]), _add(hh, h, h, form[2])
    at = partial + piece * PRODUCTS
    tl.store(at, _sum(gg))
    tl.store(at + 1, _sum(gh))
    tl.store(at + 2, _sum(hh))


@triton.jit
def _zero(in_float64: tl.constexpr):
    if in_float64:
        return tl.zeros([BLOCK], tl.float64), tl.zeros([1], tl.float32)
    else:
        return tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)


@triton.jit
def _add(sums, a, b, in_float64: tl.constexpr):
    """Add the products of two floats, exact in float64, or with their error beside them."""
    high, low = sums
    if in_float64:
        return tl.fma(a.to(tl.float64), b.to(tl.float64), high), low
    else:
        product = a * b
        error = tl.fma(a, b, -product)
        total = high + product
        of_product = total - high  # Knuth's sum of two
        error += (high - (total - of_product)) + (product - of_product)
        return total, low + error


@triton.jit
def _sum(sums):
    high, low = sums
    return tl.sum(high.to(tl.float64), 0) + tl.sum(low.to(tl.float64), 0)


@triton.jit(do_not_specialize=["count"])
def sum_pieces(table, partial, numbers, count):
    """Write each row's products: the sums over its pieces, in one order. A program for each."""
    row = tl.program_id(0)
    begin, end = tl.load(table + BEGIN * count + row), tl.load(table + END * count + row)
    gg, gh = tl.zeros([ROWS], tl.float64), tl.zeros([ROWS], tl.float64)
    hh = tl.zeros([ROWS], tl.float64)
    for first in range(begin, end, ROWS):
        some = first + tl.arange(0, ROWS)
        at, mask = partial + some * PRODUCTS, some < end
        gg += tl.load(at, mask=mask, other=0.0)
        gh += tl.load(at + 1, mask=mask, other=0.0)
        hh += tl.load(at + 2, mask=mask, other=0.0)
    at = numbers + HEADER + row * PRODUCTS
    tl.store(at, tl.sum(gg, 0))
    tl.store(at + 1, tl.sum(gh, 0))
    tl.store(at + 2, tl.sum(hh, 0))


@triton.jit(do_not_specialize=["count"])
def total(numbers, count):
    """Write the sum of all <g, g>."""
    sums = tl.zeros([ROWS], tl.float64)
    for first in range(0, count, ROWS):
        row = first + tl.arange(0, ROWS)
        sums += tl.load(numbers + HEADER + row * PRODUCTS, mask=row < count, other=0.0)
    tl.store(numbers + TOTAL, tl.sum(sums, 0))


@triton.jit(do_not_specialize=["count"])
def settle(table, fresh, numbers, before, after, count):
    """Write the norm, the factor of the global clip and the verdict, and the factors of each row.

    Count the steps of each parameter, and the skipped ones: from `before` to `after`.
    """
    norm = tl.sqrt(tl.load(numbers + TOTAL))
    applied = norm < float("inf")
    most = _slot(fresh + count, True)
    scale = tl.where(applied, tl.minimum(most / (norm + 1e-6), 1.0), 1.0)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    _settle_rows(table, fresh, numbers, count, row, scale, applied)
    if tl.program_id(0) == 0:
        tl.store(numbers + NORM, norm)
        tl.store(numbers + SCALE, scale)
        tl.store(numbers + APPLIED, applied.to(tl.float64))
        in_a_row = tl.where(applied, 0, tl.load(before + 1) + 1)
        tl.store(after, tl.load(before) + tl.where(applied, 0, 1))
        tl.store(after + 1, in_a_row)
        tl.store(after + 2, tl.maximum(tl.load(before + 2), in_a_row))


@triton.jit
def _settle_rows(table, fresh, numbers, count, row, scale, applied):
    mask = row < count
    settings = _settings(table, fresh, row, count)
    counter = tl.load(table + STEP * count + row, mask=mask, other=0)
    counter = counter.to(tl.pointer_type(tl.float32))
    present = tl.load(table + GROUP * count + row, mask=mask, other=0) != 0
    steps = tl.load(counter, mask=present, other=0.0)
    tl.store(counter, steps + tl.where(applied, 1.0, 0.0), mask=present)
    made = steps.to(tl.float64)

    at = numbers + HEADER + row * PRODUCTS
    gg = tl.load(at, mask=mask, other=0.0)
    gh = tl.load(at + 1, mask=mask, other=0.0)
    hh = tl.load(at + 2, mask=mask, other=0.0)
    usable = hh < float("inf")  # else there is no correction, as in a first step
    gh, hh = tl.where(usable, gh, 0.0), tl.where(usable, hh, 0.0)
    tl.store(at + 1, gh, mask=mask)
    tl.store(at + 2, hh, mask=mask)
    kappa = tl.where(usable & (made != 0), _slot(settings + KAPPA, mask), 0.0)
    ours = (1 + kappa) * scale
    squared = ours * ours * gg - 2 * kappa * ours * gh + kappa * kappa * hh
    clip = tl.minimum(_slot(settings + CLIP, mask) / tl.sqrt(tl.maximum(squared, 0.0)), 1.0)

    to = numbers + HEADER + count * PRODUCTS + row * FACTORS
    tl.store(to + OF_KAPPA, kappa, mask=mask)
    tl.store(to + OF_CLIP, clip, mask=mask)
    tl.store(to + UNUSABLE, tl.where(usable, 0.0, 1.0), mask=mask)
    # beta^t from the logarithm of beta.
    of_beta1 = tl.exp((made + 1) * _slot(settings + LOG1, mask))
    of_beta2 = tl.exp((made + 1) * _slot(settings + LOG2, mask))
    tl.store(to + UNBIAS1, 1 / (1 - of_beta1), mask=mask)
    tl.store(to + UNBIAS2, 1 / (1 - of_beta2), mask=mask)
    extra = tl.where(made == 0, _slot(settings + EXTRA, mask), 0.0)
    tl.store(to + OF_OUT, _slot(settings + OUT, mask) + extra, mask=mask)
    tl.store(to + OF_ADD, _slot(settings + ADD, mask) + extra, mask=mask)


@triton.jit
def _settings(table, fresh, row, count):
    """Return where the settings of rows are; without a gradient, the settings of no group."""
    group = tl.load(table + GROUP * count + row, mask=row < count, other=0)
    return fresh + count + group * SLOTS


@triton.jit
def _slot(slot, mask):
    return tl.load(slot, mask=mask, other=0).to(tl.float64, bitcast=True)


@triton.jit(do_not_specialize=["count", "first"])
def update(table, fresh, pieces, numbers, count, first, form: tl.constexpr):
    """Update weights and state of each piece from the `first` on, if the step is applied.

    `form` is the kind of update, and the dtypes of weight, gradient, last gradient (None: the
    gradient is not corrected), first buffer and second moment.
    """
    piece = first + tl.program_id(0)
    if tl.load(numbers + APPLIED) != 0:
        row, start, length = _piece(table, pieces, piece, count)
        weight = _address(table + WEIGHT * count + row, start, form[1])
        grad = _address(fresh + row, start, form[2])
        last = _address(table + LAST * count + row, start, form[3])
        moment = _address(table + FIRST * count + row, start, form[4])
        second = _address(table + SECOND * count + row, start, form[5])
        at = (weight, grad, last, moment, second)
        stack = tl.load(table + STACK * count + row) != 0
        group = fresh + count + tl.load(table + GROUP * count + row) * SLOTS
        factors = numbers + HEADER + count * PRODUCTS + row * FACTORS
        f = (_float(numbers + SCALE), stack)
        f += (_float(factors + OF_KAPPA), _float(factors + OF_CLIP), _float(factors + UNUSABLE))
        if form[0] == "adamw":
            f += (_setting(group + RATE1), _setting(group + RATE2), _setting(group + EPS))
            f += (_float(factors + UNBIAS1), _float(factors + UNBIAS2))
        elif form[0] == "lean sign" or form[0] == "lean momentum":
            f += (_setting(group + MIX), _float(factors + OF_OUT))
            f += (_setting(group + KEEP), _float(factors + OF_ADD))
        else:
            f += (_setting(group + RATE1),)
        step = (_setting(group + LR), _setting(group + DECAY))
        hinted = _elements_hinted(weight | grad | last | moment | second, length)
        for offset in range(0, hinted, BLOCK):
            _update_block(at, f, step, offset, length, form, True)
        for offset in range(hinted, length, BLOCK):
            _update_block(at, f, step, offset, length, form, False)


@triton.jit
def _address(column, start, dtype: tl.constexpr):
    """Return where a tensor's elements from the `start` on lie; 0 for one that is not used."""
    if dtype is None:
        return tl.zeros([], tl.int64)
    else:
        return tl.load(column) + start * (dtype.primitive_bitwidth // 8)


@triton.jit
def _float(number):
    return tl.load(number).to(tl.float32)


@triton.jit
def _setting(slot):
    return tl.load(slot).to(tl.float64, bitcast=True).to(tl.float32)


@triton.jit
def _update_block(at, f, step, offset, length, form: tl.constexpr, full: tl.constexpr):
    g = _read(at[1], offset, length, form[2], full)
    m = _read(at[3], offset, length, form[4], full)
    used = g * f[0]
    c = used
    if form[3] is not None:
        h = _read(at[2], offset, length, form[3], full)
        h = tl.where(f[4] != 0, used, h)
        h = tl.where(g == 0, tl.where(f[1], used, h), h)
        c = (used + f[2] * (used - h)) * f[3]
        # What is written does not depend on h, and another thread may write than has read.
        tl.debug_barrier()
        _write(at[2], offset, used, length, form[3], full)
    if form[0] == "lean sign" or form[0] == "lean momentum":
        direction = f[5] * m + f[6] * used
        new_m = f[7] * m + f[8] * used
    else:
        new_m = m + f[5] * (c - m)
        direction = new_m
    if form[0] == "adamw":
        v = _read(at[4], offset, length, form[5], full)
        new_v = v + f[6] * (c * c - v)
        root = tl.sqrt_rn(new_v * f[9]) + f[7]
        direction = tl.div_rn(new_m * f[8], root)
        _write(at[4], offset, new_v, length, form[5], full)
    else:
        direction = tl.where(direction > 0, 1.0, tl.where(direction < 0, -1.0, 0.0))
    _write(at[3], offset, new_m, length, form[4], full)
    if form[1] is not None:
        x = _read(at[0], offset, length, form[1], full)
        _write(at[0], offset, x - step[0] * (direction + step[1] * x), length, form[1], full)
