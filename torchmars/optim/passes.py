"""The passes of a step over its tensors, by torch: loops, which torch.compile may take.

A step makes five passes, in the order of `MARS.step`: `products`, `settle`, `update`, `pack` and
`step_along`; in exact mode `look_ahead` makes one more. This is one of two sets: on a GPU Triton's
launches make the same ones (`gpu/launches.py`). Nothing waits for the device: every factor is a
tensor in the dtype of the computation.
"""

import functools
import itertools
import math
import types
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from torchmars.optim.compiling import announce_compilation
from torchmars.optim.matrices.exchange import BlockOf
from torchmars.optim.plans import Plans
from torchmars.optim.rules import (
    Buffers,
    ElementwiseRule,
    Factors,
    MarsM,
    MatrixRule,
    Rule,
    corrected,
)
from torchmars.optim.step import (
    GroupTelemetry,
    GroupTensors,
    Verdict,
    correction_factors,
    count_skipped,
    judged,
)
from torchmars.optim.tensors import flat_parts, flat_slices

# Parts of a tensor that is added up on a GPU: some for each of its processors.
GPU_PARTS = 1024


class Calls(NamedTuple):
    """The inputs of a compiled call on a type of device."""

    min_elements: int  # of a tensor
    max_tensors: int


# A call costs the host about as much as four tensors do. A CPU has that time, and long calls
# compile slowly there; for small tensors one does not pay. A GPU launches a kernel for each
# operation where they are not compiled.
CALLS = defaultdict(lambda: Calls(2**16, 4), cuda=Calls(2, 16))


# A weight (None: it is not updated), its gradient, last gradient and buffers, all flat.
Tensors = tuple[Tensor | None, Tensor, Tensor | None, Buffers]


class TorchPasses:
    """The passes by torch, over the `groups` of one step. `exact` and `compile`: see `MARS`.

    Whether they are compiled changes last digits only. Nothing is written unless a step is applied.
    """

    def __init__(
        self, groups: Sequence[GroupTensors], plans: Plans, exact: bool, compile: bool
    ) -> None:
        self.groups, self.plans, self.exact, self.compile = groups, plans, exact, compile
        self.conditional = plans.conditional
        self._factors: list[Factors] = []  # of each group
        self._of_each: dict[int, list[Factors]] = {}  # of each tensor of a group of matrices
        for group in groups:
            group.flatten()

    def products(self, with_last: bool = True) -> Tensor:
        """Return <g, g>, <g, h> and <h, h> of each parameter's part here, [parameters, 3].

        In float64; the last two are 0 where no h is kept, and without `with_last`.
        """
        partial: dict[Tensor, Tensor] = {}
        for group in self.groups:
            lasts = group.last_grads if with_last else []
            function = inner_products_of_stacks if group.stacks else inner_products
            if not lasts:
                function = squared_norms
            compile = self.compile and (bool(lasts) or group.grads[0].is_cpu)
            calls = calls_of(function, group.grads, compile)
            sums = [call(group.grads[some], lasts[some]) for call, some in calls]
            partial |= zip(group.parameters, torch.cat(sums).unbind())
        # Every rank adds up all parameters, also those that have no gradient on this one.
        without = torch.zeros(3, dtype=torch.float64, device=self.plans.device)
        rows = [partial.get(each, without) for each in self.plans.parameters]
        return torch.stack(rows) if rows else without.new_zeros(0, 3)

    def settle(
        self, total: Tensor, products: Tensor, max_grad_norm: float | None, skipped: Tensor
    ) -> tuple[Verdict, Tensor, list[GroupTelemetry]]:
        """Return the verdict by the sums, the counts of `skipped` steps, and the telemetry.

        Find the factors of every tensor, and count its step. `total` is the sum of all <g, g>,
        `products` are those of whole tensors.
        """
        verdict, telemetry = judged(total, max_grad_norm), []
        of = dict(zip(self.plans.parameters, products.unbind()))
        for group in self.groups:
            steps = [each["step"] for each in group.states]
            made = torch.stack(steps).double()
            rows = torch.stack([of[each] for each in group.parameters])
            rows, kappa, clip, unusable = correction_factors(group, rows, made, verdict.scale)
            unbias = [1 / (1 - beta ** (made + 1)) for beta in group.settings["betas"]]
            keeps = group.corrects and not self.exact
            columns = (kappa, clip, unusable, *unbias)
            self._factors.append(group.factors(verdict, columns, keeps))
            telemetry.append(
                GroupTelemetry(group.role, group.corrects, verdict.scale, rows, kappa, clip)
            )
            torch._foreach_add_(steps, [verdict.applied.float()] * len(steps))
        return verdict, count_skipped(skipped, verdict.applied), telemetry

    def update(self, matrices: bool) -> None:
        """Update the state of `matrices`, or the state and the weights of all others."""
        for group, factors in zip(self.groups, self._factors):
            if isinstance(group.rule, MatrixRule) != matrices:
                continue
            nothing = [None] * len(group.parameters)
            weights, lasts = nothing if matrices else group.weights, group.last_grads or nothing
            tensors = list(zip(weights, group.grads, lasts, group.buffers))
            calls = list(calls_of(update_of(group.rule), group.grads, self.compile))
            parts = factors.split([len(tensors[some]) for _, some in calls])
            for (call, some), part in zip(calls, parts):
                call(tensors[some], part)

    def pack(self, kind: int, blocks: Sequence[BlockOf]) -> None:
        """Write what is to be orthogonalised to the values of blocks of the group number `kind`.

        The direction is made of the new buffers.
        """
        group = self.groups[kind]
        assert isinstance(group.rule, MatrixRule)
        if kind not in self._of_each:
            self._of_each[kind] = self._factors[kind].of_each()
        factors = self._of_each[kind]
        # Then the direction is the momentum, and nobody reads g.
        alone = group.corrects and type(group.rule).direction is MarsM.direction
        for number, start, _, values in blocks:
            f, of_tensor = factors[number], (group.grads[number], *group.buffers[number])
            g, *new = flat_slices((each, start, len(values)) for each in of_tensor)
            # Of a broken step the direction is not used, but 0 times NaN would be.
            g = g if alone else f.scale * g.where(f.applied, 0).to(f.scale.dtype)
            values.copy_(group.rule.direction(tuple(each.to(f.scale.dtype) for each in new), g, f))

    def step_along(self, kind: int, blocks: Sequence[BlockOf]) -> None:
        """Step along the directions d, the values of blocks: x <- (1 - lr weight_decay) x - lr d.

        d is times the rule's scale. x is rounded once.
        """
        group, f = self.groups[kind], self._factors[kind]
        assert isinstance(group.rule, MatrixRule)
        lr = f.lr * f.applied
        keep = 1 - lr * f.weight_decay
        lr_of = {shape: lr * group.rule.scale(*shape) for shape in {each.shape for each in blocks}}
        slices = ((group.weights[each.number], each.start, len(each.values)) for each in blocks)
        for x, block in zip(flat_slices(slices), blocks):
            wide, d = x.to(keep.dtype), block.values.to(keep.dtype)
            if self.conditional:
                d = d.where(f.applied, 0)
            x.copy_(wide.mul_(keep).addcmul_(d, lr_of[block.shape], value=-1))

    def look_ahead(
        self, total: Tensor, max_grad_norm: float | None, ahead: Mapping[Tensor, Tensor]
    ) -> None:
        """Write each gradient after the global clip to its tensor `ahead`; NaN in a broken step."""
        verdict = judged(total, max_grad_norm)
        for group in self.groups:
            targets = flat_parts(ahead[each] for each in group.parameters if each in ahead)
            for g, h in zip(group.grads, targets):  # a group keeps them of all, or of none
                used = g.to(group.dtype) * verdict.scale.to(group.dtype)
                # Where one is broken none of them is used, since their norm is unknown.
                h.copy_(torch.where(verdict.applied, used, math.nan))


@functools.cache
def update_of(rule: Rule) -> Callable[[Sequence[Tensors], Factors], None]:
    """Return the update by a rule of weights, last gradients and buffers, in place."""

    def update(tensors: Sequence[Tensors], factors: Factors) -> None:
        for (x, g, h, buffers), f in zip(tensors, factors.of_each()):
            used = g.to(f.scale.dtype) * f.scale
            c = used if h is None else corrected(used, h, f)
            old = tuple(each.to(used.dtype) for each in buffers)
            new = rule.momentum(old, c, f)
            if isinstance(rule, ElementwiseRule) and x is not None:
                wide = x.to(used.dtype)
                direction = rule.direction(old, new, c, f)
                write_if(f.applied, x, wide - f.lr * (direction + f.weight_decay * wide))
            for buffer, values in zip(buffers, new):
                write_if(f.applied, buffer, values)
            if f.keeps and h is not None:
                write_if(f.applied, h, used)

    # Code of its own: how often torch compiles one again is limited.
    code = update.__code__.replace(co_name=f"update_{rule.name}")
    return types.FunctionType(code, update.__globals__, code.co_name, None, update.__closure__)


def write_if(applied: Tensor, target: Tensor, values: Tensor) -> None:
    """Write `values` to `target` in its dtype, if the step is `applied`.

    On a CPU it is, as the host has seen (`MARS.step`), and no loop spends time on the choice. That
    took a sixth of a step, and half of one whose last gradients are in bfloat16.
    """
    if not target.is_cpu:
        values = values.where(applied, target.to(values.dtype))
    target.copy_(values)


def inner_products(grads: Sequence[Tensor], lasts: Sequence[Tensor]) -> Tensor:
    """Return <g, g>, <g, h> and <h, h> of each g and h, [n, 3] in float64.

    The norm that follows from them cancels when kappa is large, hence the float64.
    """
    partial = []
    for g, h in zip(grads, lasts):
        # By way of float32: compiled code is then vectorised.
        g, h = (each.to(torch.promote_types(each.dtype, torch.float32)).double() for each in (g, h))
        for values in (g * g, g * h, h * h):
            if values.is_cpu:
                partial.append(values.sum()[None])
            else:  # by parts: one kernel for all tensors would give no work to all of a GPU
                parts = F.pad(values, (0, -len(values) % GPU_PARTS)).view(GPU_PARTS, -1)
                partial.append(parts.sum(-1))
    return torch.stack(partial).sum(-1).view(-1, 3)


def inner_products_of_stacks(grads: Sequence[Tensor], lasts: Sequence[Tensor]) -> Tensor:
    """Return the `inner_products` of each g and h where h is taken as 0 wherever g is exactly 0."""
    return inner_products(grads, [h.where(g != 0, 0) for g, h in zip(grads, lasts)])


def squared_norms(grads: Sequence[Tensor], lasts: Sequence[Tensor]) -> Tensor:
    """Return <g, g>, 0 and 0 of each g, [n, 3] in float64. Not for torch.compile on GPUs."""
    if grads[0].is_cpu:
        norms = [torch.linalg.vector_norm(g, dtype=torch.float64) for g in grads]
    else:  # one kernel for all of them
        norms = list(torch._foreach_norm(list(grads), 2, torch.float64))
    return F.pad(torch.stack(norms).square()[:, None], (0, 2))


def calls_of(
    call: Callable, tensors: Sequence[Tensor], compile: bool
) -> Iterator[tuple[Callable, slice]]:
    """Yield the calls for all `tensors`: `call`, and which of them go into it.

    With `compile`, large tensors go through the compiled call, neighbours of one length together.
    It is cached by `call`, which must be the same object at every step.
    """

    if not compile:
        yield call, slice(None)
        return

    def length_to_compile(tensor: Tensor) -> int | None:
        return length if (length := tensor.numel()) >= least else None

    start, least = 0, CALLS[tensors[0].device.type].min_elements
    for length, alike in itertools.groupby(tensors, length_to_compile):
        first, *others = alike
        left = 1 + len(others)
        calls = 1 if length is None else -(-left // CALLS[first.device.type].max_tensors)
        while calls:  # as even as can be: a call compiles once for each count
            count = -(-left // calls)
            yield call if length is None else _compiled(call), slice(start, start + count)
            start, left, calls = start + count, left - count, calls - 1


@functools.cache
def _compiled(call: Callable) -> Callable:
    announce_compilation()
    # What is asserted is so of every flat tensor, and took a fifth of a call.
    return torch.compile(call, dynamic=True, options={"size_asserts": False})
