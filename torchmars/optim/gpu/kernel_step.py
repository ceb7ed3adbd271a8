"""A step by kernels, on one GPU: one launch for all tensors, one copy for all that changed."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from torchmars.optim.gpu import launches, programs
from torchmars.optim.gpu.kernel_matrices import KernelMatrices
from torchmars.optim.gpu.numbers import Given, Numbers
from torchmars.optim.gpu.table import AddressTable, Form
from torchmars.optim.matrices.exchange import Exchange
from torchmars.optim.plans import Plans
from torchmars.optim.rules import RULES, MatrixRule
from torchmars.optim.rules.lean import LeanForm
from torchmars.optim.rules.lion import Lion
from torchmars.optim.step import GroupTensors, State
from torchmars.optim.telemetry import GroupTelemetry
from torchmars.optim.tensors import innermost, local_gradient


class Outcome(NamedTuple):
    """The results of a step on the device."""

    norm: Tensor
    """The global norm of all gradients before the clip, 0-d."""
    skipped: Tensor
    """The counts of `MARS`."""
    telemetry: list[GroupTelemetry]


class KernelStep:
    """The steps of an optimizer by kernels, for its `plans`.

    Weights and state keep their rows of a table as long as their addresses are the same: these are
    compared in each step, since loops that offload move them. The addresses of the gradients and
    the groups' settings are sent again when one of them changed.
    """

    def __init__(self, plans: Plans) -> None:
        self.plans, self.device = plans, plans.device
        self._in_float64 = launches.sums_in_float64(self.device)
        self._made_of: tuple[object, list[int]] = None, []
        self._table: AddressTable | None = None
        self._sent: tuple[list[int], list[float]] = [], []
        self._fresh = torch.empty(0)

    def try_one(self) -> None:
        """Launch a kernel on nothing. Raises Triton's errors."""
        table = torch.zeros(10, 1, dtype=torch.int64, device=self.device)
        numbers = Numbers.empty(1, self.device).values
        launches.launch(programs.sum_pieces, 1, table, numbers, numbers, 1)

    def step(
        self,
        groups: Sequence[GroupTensors],
        state: Mapping[Tensor, State],
        max_grad_norm: float | None,
        skipped: Tensor,
    ) -> Outcome | None:
        """Make a step. None, and nothing done, where there are no kernels for it.

        `skipped`: see `MARS`. Collective as a step without kernels.
        """
        if _on_gpu(groups, max_grad_norm) or launches.is_capturing(self.device):
            return None
        table = self._current_table(groups, state)
        if table is None:
            return None
        # Some are made here. They live until the last launch.
        gradients = [local_gradient(each) for group in groups for each in group.parameters]
        fresh = self._send(table, groups, gradients, max_grad_norm)
        numbers = Numbers.empty(len(self.plans.parameters), self.device)
        given = Given(table, fresh, numbers)
        after = self._settle(given, skipped)
        self._update(given, groups)
        # Autograd does not see writes of kernels.
        increment_version([each for group in groups for each in group.parameters])
        scale, products = numbers.values[programs.SCALE.value], numbers.products
        kappa, clip, *_ = numbers.factors.unbind(1)
        telemetry = [
            GroupTelemetry(group.role, scale, products, kappa, clip, rows)
            if group.corrects
            else GroupTelemetry(group.role, scale, products, None, None, rows)
            for group, rows in zip(groups, table.rows_of)
        ]
        return Outcome(numbers.values[programs.NORM.value], after, telemetry)

    def _settle(self, given: Given, skipped: Tensor) -> Tensor:
        """Read all gradients, sum over the ranks, and settle all that follows from the sums.

        Return the counts of `skipped` steps after this one.
        """
        table, fresh, numbers = given
        values, count = numbers.values, numbers.count
        partial = torch.empty(len(table.pieces), 3, dtype=torch.float64, device=self.device)
        for first, pieces, (g, h) in table.sums:
            form = g, g if h is None else h, self._in_float64
            arguments = table.rows, fresh, table.pieces, partial, count, first
            launches.launch(programs.inner_products, pieces, *arguments, form=form)
        launches.launch(programs.sum_pieces, count, table.rows, partial, values, count)
        self.plans.shard_sum.sum_(numbers.products)
        launches.launch(programs.total, 1, values, count)
        self.plans.totals.settle_(values[programs.TOTAL.value], numbers.products)
        after, blocks = torch.empty_like(skipped), -(-max(1, count) // programs.ROWS.value)
        launches.launch(programs.settle, blocks, table.rows, fresh, values, skipped, after, count)
        return after

    def _update(self, given: Given, groups: Sequence[GroupTensors]) -> None:
        """Update weights and state, in the order of `update_groups`, if the step is applied."""
        matrices = [
            KernelMatrices(given, number, group)
            for number, group in enumerate(groups)
            if isinstance(RULES[group.rule], MatrixRule)
        ]
        exchange = Exchange(self.plans.traffic, matrices)
        _launch_updates(given, "momentum")
        exchange.start()
        _launch_updates(given, "adamw", "sign", "lean sign")  # while matrices travel
        exchange.finish()
        _launch_updates(given, "lean momentum")  # whose old values the directions were made of

    def _current_table(
        self, groups: Sequence[GroupTensors], state: Mapping[Tensor, State]
    ) -> AddressTable | None:
        """Return the table of the tensors as they lie now; None if there are no kernels for it."""
        tensors = [
            each
            for parameter in self.plans.parameters
            for each in (parameter, *state[parameter].values())
        ]
        made_of = self.plans.kinds.sorted, [innermost(each).data_ptr() for each in tensors]
        if made_of[0] is not self._made_of[0] or made_of[1] != self._made_of[1]:
            self._made_of, self._table = (None, []), None  # also where memory runs out below
            try:
                if all(innermost(each).device == self.device for each in tensors):
                    table = AddressTable(self.plans.parameters, groups)
                    table.check_wires(each.dtype for each in self.plans.traffic)
                    table.rows = launches.sent(table.rows, self.device)
                    table.pieces = launches.sent(table.pieces, self.device)
                    self._table = table
            except KeyError:  # a rule, a dtype or a state without a kernel
                pass
            self._made_of = made_of
        return self._table

    def _send(
        self,
        table: AddressTable,
        groups: Sequence[GroupTensors],
        gradients: Sequence[Tensor],
        max_grad_norm: float | None,
    ) -> Tensor:
        """Return the inputs that may change in a step, on the device, by at most one copy."""
        addresses = [0] * len(self.plans.parameters)
        rows = (row for rows in table.rows_of for row in rows)
        for row, gradient in zip(rows, gradients):
            addresses[row] = gradient.data_ptr()
        # Those of no group: of parameters without gradient, except the first number.
        settings = [
            math.inf if max_grad_norm is None else float(max_grad_norm),
            *[0.0] * (programs.SLOTS.value - 1),
        ]
        for group, form in zip(groups, table.forms):
            settings += group_settings(group, form)
        if (addresses, settings) != self._sent:
            bits = torch.tensor(settings, dtype=torch.float64).view(torch.int64)
            self._fresh = launches.sent(torch.cat([torch.tensor(addresses), bits]), self.device)
            self._sent = addresses, settings  # last: there may have been no memory
        return self._fresh


def _on_gpu(groups: Sequence[GroupTensors], max_grad_norm: float | Tensor | None) -> bool:
    """Return whether a setting lies on a GPU, where the host cannot read it without waiting."""
    names = "lr", "weight_decay", "eps", "gamma", "clip"
    numbers = [group.settings[name] for group in groups for name in names]
    numbers += [max_grad_norm, *(beta for group in groups for beta in group.settings["betas"])]
    return any(isinstance(each, Tensor) and not each.is_cpu for each in numbers)


def group_settings(group: GroupTensors, form: Form) -> list[float]:
    """Return the settings of a group in the order of the slots of `places`."""
    settings, (beta1, beta2) = group.settings, map(float, group.settings["betas"])
    lean = LeanForm(0, 0, 0, 0)
    if form.kind.startswith("lean"):
        rule = RULES[group.rule]
        assert isinstance(rule, Lion | MatrixRule)
        lean = rule.lean_form(settings)
    return [
        float(settings["lr"]),
        float(settings["weight_decay"]),
        float(settings["eps"]),
        1 - beta1,
        1 - beta2,
        math.log(beta1) if beta1 else -math.inf,
        math.log(beta2) if beta2 else -math.inf,
        float(group.kappa),
        math.inf if settings["clip"] is None else float(settings["clip"]),
        *map(float, lean),
    ]


def _launch_updates(given: Given, *kinds: str) -> None:
    """Launch the second pass of the groups whose form is of one of these `kinds`."""
    table, fresh, numbers = given
    for first, pieces, form in table.updates:
        if form.kind in kinds:
            arguments = table.rows, fresh, table.pieces, numbers.values, numbers.count, first
            launches.launch(programs.update, pieces, *arguments, form=tuple(form))
