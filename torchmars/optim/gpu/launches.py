"""The passes of a step by Triton: a copy for all that changed, and a launch for all tensors.

Each pass is one for each combination of rule and dtypes that the groups have; a bucket takes two.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from torchmars.optim.compiling import is_capturing
from torchmars.optim.gpu import programs
from torchmars.optim.gpu.table import DTYPES, AddressTable, Launch
from torchmars.optim.matrices.exchange import BlockOf
from torchmars.optim.plans import Plans
from torchmars.optim.rules import MatrixRule
from torchmars.optim.step import GroupTelemetry, GroupTensors, State, Verdict
from torchmars.optim.tensors import innermost, local_gradient


class Launcher:
    """Makes the launches of an optimizer's steps, for its `plans`. `exact`: see `MARS`.

    Weights and state keep their rows of a table as long as their addresses are the same: these are
    compared in each step, since loops that offload move them. In exact mode two tables take turns,
    as the two places of h do. The addresses of the gradients and the groups' settings are sent
    again when one of them changed.
    """

    def __init__(self, plans: Plans, exact: bool) -> None:
        self.plans, self.exact, self.device = plans, exact, plans.device
        self.in_float64 = sums_in_float64(self.device)
        self._tables: list[tuple[object, list[int], AddressTable | None]] = []
        self._sent: tuple[list[int], list[float]] = [], []
        self._fresh = torch.empty(0)

    def try_one(self) -> None:
        """Launch a program on nothing. Raises Triton's errors."""
        table = torch.zeros(programs.COLUMNS.value, 1, dtype=torch.int64, device=self.device)
        numbers = torch.empty(_length(1), dtype=torch.float64, device=self.device)
        launch(programs.sum_pieces, 1, table, numbers, numbers, 1)

    def begin(
        self,
        groups: Sequence[GroupTensors],
        state: Mapping[Tensor, State],
        ahead: Mapping[Tensor, Tensor],
        max_grad_norm: float | None,
    ) -> "Launches | None":
        """Return the passes of a step over `groups`; None if there are no launches for it.

        There are none while a graph is captured or torch compiles the step, which cannot see
        addresses; where a setting lies on a GPU, which would be waited for; and where a rule, a
        dtype or the place of some state has no program. `ahead` are the tensors for the next h.
        """
        if torch.compiler.is_compiling() or is_capturing(self.device):
            return None
        if _on_gpu(groups, max_grad_norm):
            return None
        table = self._current_table(groups, state, ahead)
        if table is None:
            return None
        gradients = [local_gradient(each) for group in groups for each in group.parameters]
        addresses = [0] * len(self.plans.parameters)
        rows = (row for rows in table.rows_of for row in rows)
        for row, gradient in zip(rows, gradients):
            addresses[row] = gradient.data_ptr()
        # Those of no group, of parameters without gradient: the first number is the norm.
        settings = [math.inf if max_grad_norm is None else float(max_grad_norm)]
        settings += [0.0] * (programs.SLOTS.value - 1)
        for group in groups:
            settings += group_settings(group)
        if (addresses, settings) != self._sent:  # what may change in a step, by at most one copy
            bits = torch.tensor(settings, dtype=torch.float64).view(torch.int64)
            self._fresh = sent(torch.cat([torch.tensor(addresses), bits]), self.device)
            self._sent = addresses, settings  # last: there may have been no memory
        return Launches(self, table, groups, gradients, self._fresh)

    def _current_table(
        self,
        groups: Sequence[GroupTensors],
        state: Mapping[Tensor, State],
        ahead: Mapping[Tensor, Tensor],
    ) -> AddressTable | None:
        """Return the table of the tensors as they lie now; None if there are no programs for it."""
        tensors = [
            each
            for parameter in self.plans.parameters
            for each in (parameter, *state[parameter].values())
        ]
        sorts = self.plans.sorted
        addresses = [innermost(each).data_ptr() for each in (*tensors, *ahead.values())]
        for same_sorts, same_addresses, table in self._tables:
            if same_sorts is sorts and same_addresses == addresses:
                return table
        # All that is kept is of these groups. It is noted last: memory may run out before.
        kept = [each for each in self._tables[-1:] if self.exact and each[0] is sorts]
        self._tables = kept
        table = None
        try:
            if all(innermost(each).device == self.device for each in tensors):
                for matrices in self.plans.matrices:
                    DTYPES[matrices.dtype]
                table = AddressTable(self.plans.parameters, groups, ahead, self.exact)
                table.rows = sent(table.rows, self.device)
                table.pieces = sent(table.pieces, self.device)
        except KeyError:  # a rule, a dtype or a state without a program
            pass
        self._tables = [*kept, (sorts, addresses, table)]
        return table


class Launches:
    """The passes of one step by Triton: `passes.TorchPasses` says what each of them does.

    Some of the `gradients` are made for it. They live until the last launch.
    """

    conditional = True  # each write asks for the verdict

    def __init__(
        self,
        launcher: Launcher,
        table: AddressTable,
        groups: Sequence[GroupTensors],
        gradients: Sequence[Tensor],
        fresh: Tensor,
    ) -> None:
        self.device, self._in_float64 = launcher.device, launcher.in_float64
        self._table, self._groups, self._gradients, self._fresh = table, groups, gradients, fresh
        self._count = len(launcher.plans.parameters)
        length = _length(self._count)
        self._numbers = torch.empty(length, dtype=torch.float64, device=self.device)

    def products(self, with_last: bool = True) -> Tensor:
        table, count = self._table, self._count
        partial = torch.empty(len(table.pieces), 3, dtype=torch.float64, device=self.device)
        for first, pieces, (g, h) in table.sums:
            form = g, h if with_last else None, self._in_float64
            self._launch(programs.inner_products, Launch(first, pieces, form), partial)
        launch(programs.sum_pieces, count, table.rows, partial, self._numbers, count)
        return self._numbers[programs.HEADER.value :][: 3 * count].view(count, 3)

    def settle(
        self, total: Tensor, products: Tensor, max_grad_norm: float | None, skipped: Tensor
    ) -> tuple[Verdict, Tensor, list[GroupTelemetry]]:
        numbers, count, after = self._numbers, self._count, torch.empty_like(skipped)
        blocks = -(-max(1, count) // programs.ROWS.value)
        arguments = self._table.rows, self._fresh, numbers, total, skipped, after, count
        launch(programs.settle, blocks, *arguments)
        norm, scale, applied = (
            numbers[each.value] for each in (programs.NORM, programs.SCALE, programs.APPLIED)
        )
        factors = numbers[programs.HEADER.value + 3 * count :].view(count, programs.FACTORS.value)
        kappa, clip, *_ = factors.unbind(1)
        telemetry = [
            GroupTelemetry(group.role, group.corrects, scale, products, kappa, clip, rows)
            for group, rows in zip(self._groups, self._table.rows_of)
        ]
        return Verdict(norm, scale, applied), after, telemetry

    def update(self, matrices: bool) -> None:
        for some in self._table.updates:
            if (some.form.weight is None) == matrices:
                self._launch(programs.update, some, self._numbers)
        # Autograd does not see these writes.
        increment_version([each for group in self._groups for each in group.parameters])

    def pack(self, kind: int, blocks: Sequence[BlockOf]) -> None:
        form = self._table.forms[kind]
        grad = form.grad if form.last is None else None
        self._launch_on(programs.pack, kind, blocks, form.rule, form.one, grad)

    def step_along(self, kind: int, blocks: Sequence[BlockOf]) -> None:
        weight = DTYPES[self._groups[kind].parameters[0].dtype]
        self._launch_on(programs.step_along, kind, blocks, weight)

    def look_ahead(
        self, total: Tensor, max_grad_norm: float | None, ahead: Mapping[Tensor, Tensor]
    ) -> None:
        # The norm to clip to and the addresses of `ahead` are in the table.
        for first, pieces, form in self._table.updates:
            if form.last is not None:
                of = Launch(first, pieces, (form.grad, form.last))
                self._launch(programs.look_ahead, of, total)

    def _launch(self, kernel: Any, some: Launch, numbers: Tensor) -> None:
        """Launch on the pieces of tensors."""
        table, (first, pieces, form) = self._table, some
        arguments = table.rows, self._fresh, table.pieces, numbers, self._count, first
        launch(kernel, pieces, *arguments, form=tuple(form))

    def _launch_on(self, kernel: Any, kind: int, blocks: Sequence[BlockOf], *form: Any) -> None:
        """Launch on blocks. Their pieces are sent once: blocks of a table come again."""
        table, first = self._table, blocks[0]
        key = kernel.__name__, kind, first.number, first.start, len(blocks)
        if key not in table.blocks:
            table.blocks[key] = sent(self._pieces(kind, blocks), self.device)
        pieces, packed = table.blocks[key], first.values.data_ptr()
        arguments = table.rows, self._fresh, pieces, self._numbers, packed, self._count
        launch(kernel, len(pieces), *arguments, form=(*form, DTYPES[first.values.dtype]))

    def _pieces(self, kind: int, blocks: Sequence[BlockOf]) -> Tensor:
        """Return the pieces of blocks, as `programs` reads them."""
        rows, rule = self._table.rows_of[kind], self._groups[kind].rule
        assert isinstance(rule, MatrixRule)
        base = blocks[0].values.storage_offset()
        pieces, scales = [], []
        for number, start, shape, values in blocks:
            for done in range(0, len(values), programs.PIECE.value):
                offset, left = values.storage_offset() - base + done, len(values) - done
                pieces.append([rows[number], start + done, offset, min(left, programs.PIECE.value)])
                scales.append(rule.scale(*shape))
        bits = torch.tensor(scales, dtype=torch.float64).view(torch.int64)
        return torch.cat([torch.tensor(pieces), bits[:, None]], 1)


def launch(kernel: Any, count: int, *arguments: Any, **form: tuple) -> None:
    """Start so many programs of a Triton kernel on the current stream.

    All launches come through here: a stub in its place does what the host does, without a GPU.
    """
    if count:
        with torch.cuda.device_of(arguments[0]):
            # Without fusion a product is rounded before it is added to, as on a CPU.
            kernel[(count,)](*arguments, num_warps=4, enable_fp_fusion=False, **form)


def sent(values: Tensor, device: torch.device) -> Tensor:
    """Return a copy on a device, without waiting.

    It is read from pinned memory of its own, which torch's allocator gives to nobody until it is
    read: the host runs ahead.
    """
    if device.type == "cuda":
        values = values.pin_memory()
    return values.to(device, non_blocking=True)


def sums_in_float64(device: torch.device) -> bool:
    """Return whether a GPU adds up in float64 as fast as it reads.

    Those for data centers do, except some, such as L40S (8.9) and B300 (10.3). Others have a 32nd
    or a 64th of float32's speed.
    """
    fast = (7, 0), (8, 0), (9, 0), (10, 0)
    return device.type != "cuda" or torch.cuda.get_device_capability(device) in fast


def group_settings(group: GroupTensors) -> list[float]:
    """Return the settings of a group in the order of the slots of `programs`."""
    clip = group.settings["clip"]
    logs = [math.log(beta) if beta else -math.inf for beta in group.settings["betas"]]
    others = [*logs, group.kappa, math.inf if clip is None else clip]
    return [float(each) for each in (*group.numbers, *others)]


def _length(count: int) -> int:
    """Return how many numbers a step of so many parameters has."""
    each = programs.PRODUCTS.value + programs.FACTORS.value
    return programs.HEADER.value + count * each


def _on_gpu(groups: Sequence[GroupTensors], max_grad_norm: float | Tensor | None) -> bool:
    """Return whether a setting lies on a GPU, where the host cannot read it without waiting."""
    numbers = [each for group in groups for each in group.settings.values()]
    numbers += [max_grad_norm, *(beta for group in groups for beta in group.settings["betas"])]
    return any(isinstance(each, Tensor) and not each.is_cpu for each in numbers)
