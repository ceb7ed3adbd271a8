"""The GPU's programs: Triton kernels over a table of all tensors, in the order of a step.

The passes over tensors have a program for each piece of one. Between the first two the sums are
settled, and all that follows from them for each tensor. The arithmetic is that of `optim/rules.py`,
`optim/step.py` and `optim/passes.py`, which say what it means: tests hold both equal.

A loop over a piece runs twice: over full blocks, which are read and written 16 bytes at a time, and
over the others (`part`). Gradients are views at any offset: the hint of 16 bytes on another address
would kill the run.
"""

import triton
import triton.language as tl

# Elements of a piece, and those that a program reads at once.
PIECE, BLOCK = tl.constexpr(2**14), tl.constexpr(2**10)
# Rows that a program settles at once.
ROWS = tl.constexpr(256)

# The columns of a table. `FIRST` is the first buffer of the state, `SECOND` the second moment,
# `AHEAD` where exact mode keeps the next step's h. A group's number is 0 for a parameter without
# gradient. `BEGIN` and `END` are the row's pieces.
WEIGHT, FIRST, SECOND, LAST, AHEAD, STEP = (tl.constexpr(column) for column in range(6))
LENGTH, STACK, GROUP, BEGIN, END, COLUMNS = (tl.constexpr(column) for column in range(6, 12))

# The settings of a group, as `launches.group_settings` lists them. The first row of them is of no
# group: it has the norm to clip to instead of lr.
LR, DECAY, EPS, BETA1, RATE1, BETA2, RATE2 = (tl.constexpr(slot) for slot in range(7))
GAMMA_NEXT, LOG1, LOG2, KAPPA, CLIP, SLOTS = (tl.constexpr(slot) for slot in range(7, 13))

# The numbers of a step, float64: these, the products of each row, and results for each row.
NORM, SCALE, APPLIED = (tl.constexpr(number) for number in range(3))
HEADER, PRODUCTS = tl.constexpr(4), tl.constexpr(3)
OF_KAPPA, OF_CLIP, UNUSABLE, UNBIAS1, UNBIAS2 = (tl.constexpr(column) for column in range(5))
FACTORS = tl.constexpr(5)

# Whose square is the largest number of float32.
ROOT_OF_LARGEST = tl.constexpr(1.8446743523953730e19)

# A piece of a block of a matrix: its row, its first element there and among the packed values, its
# length, and what the direction is scaled by, as the bits of a float64.
OF_BLOCK = tl.constexpr(5)


@triton.jit
def _piece(table, pieces, piece, count):
    """Return the row of a piece, its first element, and how many it has."""
    row, start = tl.load(pieces + 2 * piece), tl.load(pieces + 2 * piece + 1)
    left = tl.load(table + LENGTH * count + row) - start
    return row, start, tl.minimum(left, PIECE).to(tl.int32)


@triton.jit
def _hinted(addresses, length):
    """Return how many elements of a piece lie in full, aligned blocks."""
    return tl.where(addresses % 16 == 0, length // BLOCK * BLOCK, 0)


@triton.jit
def _part(part: tl.constexpr, hinted, length):
    """Return where a loop over a piece begins and ends: part 0 has its `_hinted` elements."""
    if part == 0:
        return 0, hinted
    else:
        return hinted, length


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


@triton.jit
def _address(column, start, dtype: tl.constexpr):
    """Return where a tensor's elements from the `start` on lie; 0 for one that is not used."""
    if dtype is None:
        return tl.zeros([], tl.int64)
    else:
        return tl.load(column) + start * (dtype.primitive_bitwidth // 8)


@triton.jit(do_not_specialize=["count", "first"])
def inner_products(table, fresh, pieces, partial, count, first, form: tl.constexpr):
    """Write <g, g>, <g, h> and <h, h> of each piece from the `first` on; without h it is 0.

    `form` has the dtypes of g and h (None: no h is read), and whether sums are in float64. Others
    are of two floats: for GPUs whose float64 takes longer than their memory.
    """
    grad: tl.constexpr = form[0]
    last: tl.constexpr = form[1]
    in_float64: tl.constexpr = form[2]
    piece = first + tl.program_id(0)
    row, start, length = _piece(table, pieces, piece, count)
    has_last = tl.load(table + LAST * count + row) != 0
    stack = tl.load(table + STACK * count + row) != 0
    g_at = _address(fresh + row, start, grad)
    h_at = _address(table + LAST * count + row, start, last)
    hinted = _hinted(g_at | tl.where(has_last, h_at, 0), length)
    gg, gh, hh = _zero(in_float64), _zero(in_float64), _zero(in_float64)
    for part in tl.static_range(2):
        begin, end = _part(part, hinted, length)
        for offset in range(begin, end, BLOCK):
            g = _read(g_at, offset, length, grad, part == 0)
            h = tl.zeros([BLOCK], tl.float32)
            if last is not None:
                if part == 0:  # a mask of one number keeps wide reads
                    pointers = _pointers(h_at, offset, last, True)
                    h = tl.load(pointers, mask=has_last, other=0.0).to(tl.float32)
                else:
                    h = _read(h_at, offset, tl.where(has_last, length, 0), last, False)
            h = tl.where(g == 0, tl.where(stack, 0.0, h), h)
            gg, gh = _add(gg, g, g, in_float64), _add(gh, g, h, in_float64)
            hh = _add(hh, h, h, in_float64)
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
def settle(table, fresh, numbers, total, before, after, count):
    """Write the norm, the factor of the global clip and the verdict, and the factors of each row.

    `total` is the sum of all <g, g>. Count the steps of each parameter, and the skipped ones: from
    `before` to `after`.
    """
    norm, scale, applied = _verdict(total, fresh, count)
    if tl.program_id(0) == 0:
        tl.store(numbers + NORM, norm)
        tl.store(numbers + SCALE, scale)
        tl.store(numbers + APPLIED, applied.to(tl.float64))
        in_a_row = tl.where(applied, 0, tl.load(before + 1) + 1)
        tl.store(after, tl.load(before) + tl.where(applied, 0, 1))
        tl.store(after + 1, in_a_row)
        tl.store(after + 2, tl.maximum(tl.load(before + 2), in_a_row))

    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mask = row < count
    group = tl.load(table + GROUP * count + row, mask=mask, other=0)
    settings = fresh + count + group * SLOTS  # without a gradient, those of no group
    counter = tl.load(table + STEP * count + row, mask=mask, other=0)
    counter = counter.to(tl.pointer_type(tl.float32))
    steps = tl.load(counter, mask=group != 0, other=0.0)
    tl.store(counter, steps + tl.where(applied, 1.0, 0.0), mask=group != 0)
    made = steps.to(tl.float64)

    at = numbers + HEADER + row * PRODUCTS
    gg = tl.load(at, mask=mask, other=0.0)
    gh = tl.load(at + 1, mask=mask, other=0.0)
    hh = tl.load(at + 2, mask=mask, other=0.0)
    # Not finite: there is no correction then, as in a first step.
    usable = hh < float("inf")
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


@triton.jit
def _verdict(total, fresh, count):
    """Return the norm, the factor of the global clip, and whether the step is applied."""
    norm = tl.sqrt(tl.load(total))
    finite = norm < float("inf")
    most = _slot(fresh + count, True)
    scale = tl.where(finite, tl.minimum(most / (norm + 1e-6), 1.0), 1.0)
    # float32 holds the square of what is left; and of the scale it has full digits.
    held = (scale * norm < ROOT_OF_LARGEST) & (scale >= 1.1754943508222875e-38)
    return norm, scale, finite & held


@triton.jit
def _slot(slot, mask):
    return tl.load(slot, mask=mask, other=0).to(tl.float64, bitcast=True)


@triton.jit
def _float(number):
    return tl.load(number).to(tl.float32)


@triton.jit
def _setting(slot):
    return tl.load(slot).to(tl.float64, bitcast=True).to(tl.float32)


@triton.jit
def _factors(of_row):
    """Return kappa, clip, whether h is unusable, and what takes the bias out of both moments."""
    kappa, clip = _float(of_row + OF_KAPPA), _float(of_row + OF_CLIP)
    unusable = _float(of_row + UNUSABLE) != 0
    return kappa, clip, unusable, _float(of_row + UNBIAS1), _float(of_row + UNBIAS2)


@triton.jit
def _rates(group):
    """Return beta1, 1 - beta1, beta2, 1 - beta2 and the gamma of the next step."""
    beta1, rate1 = _setting(group + BETA1), _setting(group + RATE1)
    beta2, rate2 = _setting(group + BETA2), _setting(group + RATE2)
    return beta1, rate1, beta2, rate2, _setting(group + GAMMA_NEXT)


@triton.jit
def _momentum(m, c, kappa, rates, rule: tl.constexpr, lean: tl.constexpr):
    """Return the new first buffer, by a rule's `momentum`. `lean`: no last gradient is kept."""
    beta1, rate1, beta2, rate2, gamma_next = rates
    if rule == "lion":
        return beta2 * m + rate2 * c
    elif rule == "muon":
        return beta1 * m + c
    elif rule != "adamw" and lean:
        return beta1 * m + (rate1 * (1 + kappa) - gamma_next) * c
    else:
        return m + rate1 * (c - m)


@triton.jit(do_not_specialize=["count", "first"])
def update(table, fresh, pieces, numbers, count, first, form: tl.constexpr):
    """Update weights and state of each piece from the `first` on, if the step is applied.

    `form` is a `table.Form`.
    """
    rule: tl.constexpr = form[0]
    weight: tl.constexpr = form[1]
    grad: tl.constexpr = form[2]
    last: tl.constexpr = form[3]
    one: tl.constexpr = form[4]
    two: tl.constexpr = form[5]
    keeps: tl.constexpr = form[6]
    piece = first + tl.program_id(0)
    if tl.load(numbers + APPLIED) != 0:
        row, start, length = _piece(table, pieces, piece, count)
        x_at = _address(table + WEIGHT * count + row, start, weight)
        g_at = _address(fresh + row, start, grad)
        h_at = _address(table + LAST * count + row, start, last)
        m_at = _address(table + FIRST * count + row, start, one)
        v_at = _address(table + SECOND * count + row, start, two)
        stack = tl.load(table + STACK * count + row) != 0
        scale, factors = _float(numbers + SCALE), numbers + HEADER + count * PRODUCTS
        kappa, clip, unusable, unbias1, unbias2 = _factors(factors + row * FACTORS)
        group = fresh + count + tl.load(table + GROUP * count + row) * SLOTS
        lr, decay, eps = _setting(group + LR), _setting(group + DECAY), _setting(group + EPS)
        rates = _rates(group)  # b1, 1 - b1, b2, 1 - b2, gamma of the next step
        hinted = _hinted(x_at | g_at | h_at | m_at | v_at, length)
        for part in tl.static_range(2):
            begin, end = _part(part, hinted, length)
            for offset in range(begin, end, BLOCK):
                g = _read(g_at, offset, length, grad, part == 0)
                used = g * scale
                c = used
                if last is not None:
                    h = tl.where(unusable, used, _read(h_at, offset, length, last, part == 0))
                    h = tl.where(g == 0, tl.where(stack, used, h), h)
                    c = (used + kappa * (used - h)) * clip
                    if keeps:
                        # It does not depend on h, and another thread may write than has read.
                        tl.debug_barrier()
                        _write(h_at, offset, used, length, last, part == 0)
                m = _read(m_at, offset, length, one, part == 0)
                new = _momentum(m, c, kappa, rates, rule, last is None)
                direction = new
                if rule == "adamw":
                    v = _read(v_at, offset, length, two, part == 0)
                    v += rates[3] * (c * c - v)
                    direction = tl.div_rn(new * unbias1, tl.sqrt_rn(v * unbias2) + eps)
                    _write(v_at, offset, v, length, two, part == 0)
                elif rule == "lion":
                    direction = _sign(rates[0] * m + rates[1] * c)
                elif rule == "mars-lion":
                    if last is None:
                        direction = new + rates[4] * c
                    direction = _sign(direction)
                _write(m_at, offset, new, length, one, part == 0)
                if weight is not None:
                    x = _read(x_at, offset, length, weight, part == 0)
                    x -= lr * (direction + decay * x)
                    _write(x_at, offset, x, length, weight, part == 0)


@triton.jit
def _sign(values):
    return tl.where(values > 0, 1.0, tl.where(values < 0, -1.0, 0.0))


@triton.jit
def _block(pieces, packed, dtype: tl.constexpr):
    """Return a piece of a block: its row, first element, length, and where its values are packed.

    Last comes what its direction is scaled by.
    """
    piece = pieces + tl.program_id(0).to(tl.int64) * OF_BLOCK
    values = packed + tl.load(piece + 2) * (dtype.primitive_bitwidth // 8)
    length = tl.load(piece + 3).to(tl.int32)
    return tl.load(piece), tl.load(piece + 1), length, values, _setting(piece + 4)


@triton.jit(do_not_specialize=["packed", "count"])
def pack(table, fresh, pieces, numbers, packed, count, form: tl.constexpr):
    """Write the matrices to orthogonalise to the packed values, by the rule's `direction`.

    `form` has the rule, and the dtypes of the new buffer, of the gradient (None: the direction is
    the buffer), and of the values.
    """
    rule: tl.constexpr = form[0]
    one: tl.constexpr = form[1]
    grad: tl.constexpr = form[2]
    wire: tl.constexpr = form[3]
    row, start, length, values, _ = _block(pieces, packed, wire)
    m_at = _address(table + FIRST * count + row, start, one)
    g_at = _address(fresh + row, start, grad)
    group = fresh + count + tl.load(table + GROUP * count + row) * SLOTS
    beta1, rate1, _, _, gamma_next = _rates(group)
    scale, applied = _float(numbers + SCALE), tl.load(numbers + APPLIED) != 0
    hinted = _hinted(m_at | g_at | values, length)
    for part in tl.static_range(2):
        begin, end = _part(part, hinted, length)
        for offset in range(begin, end, BLOCK):
            m = _read(m_at, offset, length, one, part == 0)
            if grad is not None:
                g = _read(g_at, offset, length, grad, part == 0)
                # Of a broken step the direction is not used, but 0 times NaN would be.
                g = scale * tl.where(applied, g, 0.0)
                if rule == "muon":
                    m = rate1 * (beta1 * m + g)
                else:
                    m += gamma_next * g
            _write(values, offset, m, length, wire, part == 0)


@triton.jit(do_not_specialize=["packed", "count"])
def step_along(table, fresh, pieces, numbers, packed, count, form: tl.constexpr):
    """Step along the directions in the packed values, if the step is applied.

    `form` has the dtypes of the weight and of the values.
    """
    weight: tl.constexpr = form[0]
    wire: tl.constexpr = form[1]
    if tl.load(numbers + APPLIED) != 0:
        row, start, length, values, of_shape = _block(pieces, packed, wire)
        x_at = _address(table + WEIGHT * count + row, start, weight)
        group = fresh + count + tl.load(table + GROUP * count + row) * SLOTS
        lr = _setting(group + LR)
        keep, scaled = 1 - lr * _setting(group + DECAY), lr * of_shape
        hinted = _hinted(x_at | values, length)
        for part in tl.static_range(2):
            begin, end = _part(part, hinted, length)
            for offset in range(begin, end, BLOCK):
                x = _read(x_at, offset, length, weight, part == 0)
                d = _read(values, offset, length, wire, part == 0)
                _write(x_at, offset, x * keep - scaled * d, length, weight, part == 0)


@triton.jit(do_not_specialize=["count", "first"])
def look_ahead(table, fresh, pieces, total, count, first, form: tl.constexpr):
    """Write each gradient after the global clip to where exact mode keeps it; NaN if it is broken.

    `total` is as of `settle`. `form` has the dtypes of a gradient and of what is kept.
    """
    grad: tl.constexpr = form[0]
    kept: tl.constexpr = form[1]
    row, start, length = _piece(table, pieces, first + tl.program_id(0), count)
    g_at = _address(fresh + row, start, grad)
    h_at = _address(table + AHEAD * count + row, start, kept)
    _, scale, applied = _verdict(total, fresh, count)
    scale = scale.to(tl.float32)
    hinted = _hinted(g_at | h_at, length)
    for part in tl.static_range(2):
        begin, end = _part(part, hinted, length)
        for offset in range(begin, end, BLOCK):
            g = _read(g_at, offset, length, grad, part == 0)
            h = tl.where(applied, g * scale, float("nan"))
            _write(h_at, offset, h, length, kept, part == 0)
