"""A step by kernels, on one GPU: one launch for all tensors, one copy for all that changed."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from torchmars.optim.gpu import launches, programs
from torchmars.optim.gpu.kernel_matrices import KernelMatrices
from torchmars.optim.gpu.table import Form, Table
from torchmars.optim.plans import Plans
from torchmars.optim.rules import MatrixRule
from torchmars.optim.rules.correction import Corrections
from torchmars.optim.rules.lean import LeanForm
from torchmars.optim.rules.lion import Lion
from torchmars.optim.step import GroupTensors, State, StepFactors
from torchmars.optim.tensors import innermost, local_gradient


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
        self._table: Table | None = None
        self._sent: tuple[list[int], list[float]] = [], []
        self._fresh = torch.empty(0)

    def reduce(
        self,
        groups: Sequence[GroupTensors],
        state: Mapping[Tensor, State],
        max_grad_norm: float | None,
        skipped: Tensor,
    ) -> "KernelReduction | None":
        """Read all gradients, sum over the ranks, and settle all that follows from the sums.

        None, and nothing done, where there are no kernels for this step. `skipped` is that of
        `MARS`. Collective as `reduce_gradients`.
        """
        if any(map(_on_gpu, groups)) or launches.is_capturing(self.device):
            return None
        table = self._current_table(groups, state)
        if table is None:
            return None
        gradients = [local_gradient(each) for group in groups for each in group.parameters]
        fresh = self._send(table, groups, gradients, max_grad_norm)
        numbers = Numbers.empty(len(self.plans.parameters), self.device)
        partial = torch.empty(len(table.pieces), 3, dtype=torch.float64, device=self.device)
        values, count = numbers.values, numbers.count
        for first, pieces, (g, h) in table.sums:
            form = g, g if h is None else h, self._in_float64
            arguments = table.rows, fresh, table.pieces, partial, count, first
            launches.launch(programs.inner_products, pieces, *arguments, form=form)
        launches.launch(programs.sum_pieces, count, table.rows, partial, values, count)
        self.plans.shard_sum.sum_(numbers.products)
        launches.launch(programs.total, 1, table.rows, fresh, values, count)
        self.plans.totals.settle_(values[:2], numbers.products)
        after, blocks = torch.empty_like(skipped), -(-max(1, count) // programs.ROWS.value)
        launches.launch(programs.settle, blocks, table.rows, fresh, values, skipped, after, count)
        clips = max_grad_norm is not None
        return KernelReduction(table, fresh, numbers, after, clips, groups, gradients)

    def _current_table(
        self, groups: Sequence[GroupTensors], state: Mapping[Tensor, State]
    ) -> Table | None:
        """Return the table of the tensors as they lie now; None if there are no kernels for it."""
        tensors = [
            each
            for parameter in self.plans.parameters
            for each in (parameter, *state[parameter].values())
        ]
        made_of = self.plans.kinds.sorted, [innermost(each).data_ptr() for each in tensors]
        if made_of[0] is not self._made_of[0] or made_of[1] != self._made_of[1]:
            self._made_of, self._table = made_of, None
            if all(innermost(each).device == self.device for each in tensors):
                try:
                    table = Table(self.plans.parameters, groups)
                except KeyError:  # a dtype without kernels
                    return None
                table.rows = launches.sent(table.rows, self.device)
                table.pieces = launches.sent(table.pieces, self.device)
                self._table = table
        return self._table

    def _send(
        self,
        table: Table,
        groups: Sequence[GroupTensors],
        gradients: Sequence[Tensor],
        max_grad_norm: float | None,
    ) -> Tensor:
        """Return what may change in a step, on the device: one copy, or none if nothing changed."""
        addresses = [0] * len(self.plans.parameters)
        rows = (row for rows in table.rows_of for row in rows)
        for row, gradient in zip(rows, gradients):
            addresses[row] = gradient.data_ptr()
        # Those of no group: of parameters without gradient, but for the first number.
        settings = [math.inf if max_grad_norm is None else max_grad_norm, *[0.0] * 15]
        settings[programs.LARGEST.value] = math.inf
        for group, form in zip(groups, table.forms):
            settings += group_settings(group, form)
        if (addresses, settings) != self._sent:
            self._sent = addresses, settings
            bits = torch.tensor(settings, dtype=torch.float64).view(torch.int64)
            self._fresh = launches.sent(torch.cat([torch.tensor(addresses), bits]), self.device)
        return self._fresh


def _on_gpu(group: GroupTensors) -> bool:
    """Return whether a setting lies on a GPU, where the host cannot read it without waiting."""
    settings = group.settings
    numbers = settings["lr"], settings["weight_decay"], settings["eps"], *settings["betas"]
    return any(isinstance(each, Tensor) and not each.is_cpu for each in numbers)


def group_settings(group: GroupTensors, form: Form) -> list[float]:
    """Return the settings of a group in the order of the slots of `places`."""
    settings, (beta1, beta2) = group.settings, map(float, group.settings["betas"])
    lean = LeanForm(0, 0, 0, 0)
    if form.kind.startswith("lean"):
        assert isinstance(group.rule, Lion | MatrixRule)
        lean = group.rule.lean_form(settings)
    return [
        float(settings["lr"]),
        float(settings["weight_decay"]),
        float(settings["eps"]),
        1 - beta1,
        1 - beta2,
        math.log(beta1) if beta1 else -math.inf,
        math.log(beta2) if beta2 else -math.inf,
        float(group.kappa),
        math.inf if settings["clip"] is None else settings["clip"],
        float(group.largest_norm),
        float(settings["cautious_decay"]),
        *map(float, lean),
    ]


@dataclass(frozen=True)
class Numbers:
    """The numbers of a step: see `programs`."""

    values: Tensor
    count: int
    """How many rows there are."""

    @staticmethod
    def empty(count: int, device: torch.device) -> "Numbers":
        """Return room for the numbers of so many rows."""
        length = programs.HEADER.value + count * (programs.PRODUCTS.value + programs.FACTORS.value)
        return Numbers(torch.empty(length, dtype=torch.float64, device=device), count)

    @property
    def products(self) -> Tensor:
        """Those of each row, [count, 3]."""
        first = programs.HEADER.value
        return self.values[first : first + self.count * 3].view(self.count, 3)

    @property
    def factors(self) -> Tensor:
        """Those of each row, [count, FACTORS]."""
        first = programs.HEADER.value + self.count * programs.PRODUCTS.value
        return self.values[first:].view(self.count, programs.FACTORS.value)


class KernelReduction:
    """The sums of a step on the device, and the second pass. The same on all ranks."""

    def __init__(
        self,
        table: Table,
        fresh: Tensor,
        numbers: Numbers,
        skipped: Tensor,
        clips: bool,
        groups: Sequence[GroupTensors],
        gradients: list[Tensor],
    ) -> None:
        self.norm = numbers.values[programs.NORM.value]
        """The global norm of all gradients before the clip, 0-d."""
        self.skipped = skipped
        """The counts of `MARS` after this step."""
        self.table, self.fresh, self.numbers, self._clips = table, fresh, numbers, clips
        self.groups, self._gradients = groups, gradients  # they live until all is launched

    def has_kernel(self, number: int) -> bool:
        """Return whether group `number` of the step is updated by kernels."""
        return self.table.forms[number].kind != ""

    def update(self, *kinds: str) -> None:
        """Update state, and weights but for those of matrices, of the groups of some `kinds`.

        If the step is applied.
        """
        table, numbers = self.table, self.numbers
        for first, pieces, form in table.updates:
            if form.kind in kinds:
                arguments = table.rows, self.fresh, table.pieces, numbers.values, numbers.count
                launches.launch(programs.update, pieces, *arguments, first, form=tuple(form))

    def matrices(self) -> list[KernelMatrices]:
        """Return the matrices of the groups that have kernels."""
        return [
            KernelMatrices(self, number, group)
            for number, group in enumerate(self.groups)
            if self.has_kernel(number) and isinstance(group.rule, MatrixRule)
        ]

    def finish(self) -> None:
        """End the step: let go of the gradients."""
        updated = [group for number, group in enumerate(self.groups) if self.has_kernel(number)]
        # Autograd does not see what kernels write.
        increment_version([each for group in updated for each in group.parameters])
        self.groups, self._gradients = [], []

    def factors(self, number: int) -> "RowFactors":
        """Return what the sums make of group `number` of the step."""
        group, rows = self.groups[number], self.table.rows_of[number]
        return RowFactors(
            self.numbers, rows, self._clips, group.dtype, group.corrects, group.stacks
        )


@dataclass(frozen=True)
class RowFactors:
    """What makes a group's `StepFactors` of the numbers of a step. It keeps no gradient."""

    numbers: Numbers
    rows: list[int]
    clips: bool
    dtype: torch.dtype
    corrects: bool
    stacks: bool

    def __call__(self) -> StepFactors:
        """Return the factors: by operations on the device, each a launch."""
        values = self.numbers.values
        rows = launches.sent(torch.tensor(self.rows), values.device)
        applied, factors = values[programs.APPLIED.value] != 0, self.numbers.factors[rows]
        scale, corrections = values[programs.SCALE.value].to(self.dtype), None
        if self.corrects:
            corrections = Corrections(
                scale,
                factors[:, programs.OF_KAPPA.value].to(self.dtype),
                factors[:, programs.OF_CLIP.value].to(self.dtype),
                factors[:, programs.UNUSABLE.value] != 0,
                applied,
                keep=True,
                stacks=self.stacks,
            )
        return StepFactors(
            applied=applied,
            scale=scale,
            globally_clipped=self.clips,
            products=self.numbers.products[rows],
            steps_made=factors[:, programs.STEPS.value],
            corrections=corrections,
            keep_apart=False,
            compile=True,
        )
