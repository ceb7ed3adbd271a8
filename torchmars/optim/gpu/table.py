"""Where the tensors of an optimizer lie, and in which pieces the programs work on them."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from torchmars.optim.gpu.programs import BEGIN, COLUMNS, PIECE
from torchmars.optim.rules import AdamW, Lion, MarsAdamW, MarsLion, MarsM, MarsShampoo, Muon, Rule
from torchmars.optim.step import GroupTensors, State
from torchmars.optim.tensors import innermost

DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
# What `programs.update` calls a rule. One that derives from these may do it in another way.
PROGRAMS: dict[type[Rule], str] = {
    AdamW: "adamw",
    MarsAdamW: "adamw",
    Lion: "lion",
    MarsLion: "mars-lion",
    Muon: "muon",
    MarsM: "mars",
    MarsShampoo: "mars",
}


class Form(NamedTuple):
    """What is constant in a launch of `programs.update`: a rule of `PROGRAMS`, and dtypes.

    Weights of matrix rules are not updated there. Others have no last gradient, or second moment.
    """

    rule: str
    weight: tl.dtype | None
    grad: tl.dtype
    last: tl.dtype | None
    one: tl.dtype  # of the first buffer
    two: tl.dtype | None  # of the second moment
    keeps: bool  # whether the gradient becomes the last one

    @staticmethod
    def of(group: GroupTensors, exact: bool) -> "Form":
        """Return the form of a group. Raises `KeyError` for a rule or a dtype without programs."""
        rule = PROGRAMS[type(group.rule)]
        dtypes = {name: each.dtype for name, each in group.states[0].items() if name != "step"}
        first = next(iter(dtypes))
        gradient = group.parameters[0].grad
        assert gradient is not None
        return Form(
            rule,
            None if rule in ("mars", "muon") else DTYPES[group.parameters[0].dtype],
            DTYPES[gradient.dtype],
            DTYPES[dtypes["last_grad"]] if group.corrects else None,
            DTYPES[dtypes[first]],
            DTYPES[dtypes["exp_avg_sq"]] if "exp_avg_sq" in dtypes else None,
            group.corrects and not exact,
        )


class Launch(NamedTuple):
    """Which pieces a launch works on: so many, from the `first` on."""

    first: int
    pieces: int
    form: Any


class AddressTable:
    """The rows of all parameters of an optimizer, and the pieces of those that have a gradient.

    They hold while the addresses and the groups of a step stay as they are. `ahead` are the tensors
    where exact mode keeps the next step's h.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        groups: Sequence[GroupTensors],
        ahead: Mapping[Tensor, Tensor],
        exact: bool,
    ) -> None:
        self.forms = [Form.of(group, exact) for group in groups]
        # Neighbours share launches. Where no last gradient is read, any dtype of one will do.
        order = sorted(
            range(len(groups)),
            key=lambda each: (str(self.forms[each][2:4]), str(self.forms[each])),
        )
        place = {parameter: row for row, parameter in enumerate(parameters)}
        self.blocks: dict[tuple, Tensor] = {}
        """Pieces of blocks of matrices, for each list of blocks that an exchange has."""
        self.rows_of = [[place[each] for each in group.parameters] for group in groups]
        columns = [[0] * COLUMNS.value for _ in parameters]
        of_rows: list[int] = []
        launches, first = [], 0
        for number in order:
            group, begin = groups[number], first
            for row, parameter, each in zip(self.rows_of[number], group.parameters, group.states):
                pieces = -(-innermost(parameter).numel() // PIECE.value)
                addresses = _addresses(parameter, group, each, ahead.get(parameter))
                length = innermost(parameter).numel()
                columns[row] = [*addresses, length, group.stacks, number + 1, first, first + pieces]
                of_rows += [row] * pieces
                first += pieces
            launches.append(Launch(begin, first - begin, self.forms[number]))
        by_row = torch.tensor(columns, dtype=torch.int64).view(len(columns), COLUMNS.value)
        self.rows = by_row.T.contiguous()
        rows = torch.tensor(of_rows, dtype=torch.int64)
        numbers = torch.arange(first) - self.rows[BEGIN.value][rows]  # among those of a row
        self.pieces = torch.stack([rows, numbers * PIECE.value], 1)
        self.sums = _sum_launches(launches)
        self.updates = [
            Launch(some[0].first, sum(each.pieces for each in some), form)
            for form, alike in itertools.groupby(launches, lambda each: each.form)
            for some in [list(alike)]
        ]


def _addresses(
    parameter: Tensor, group: GroupTensors, state: State, ahead: Tensor | None
) -> list[int]:
    """Return where a parameter, its state and the next h lie: the first columns of its row.

    Raises `KeyError` for state that somebody has replaced by what is not as the others.
    """
    like, names = innermost(parameter), [name for name in state if name != "step"]
    for name in names:
        buffer = innermost(state[name])
        if buffer.dtype != group.states[0][name].dtype or buffer.stride() != like.stride():
            raise KeyError(name)
    if state["step"].dtype != torch.float32:
        raise KeyError("step")
    tensors = [parameter, *(state.get(name) for name in (names[0], "exp_avg_sq", "last_grad"))]
    return [0 if each is None else innermost(each).data_ptr() for each in (*tensors, ahead)] + [
        innermost(state["step"]).data_ptr()
    ]


def _sum_launches(launches: Iterable[Launch]) -> list[Launch]:
    """Return the launches of the first pass. Where no last gradient is read any dtype will do."""
    merged: list[Launch] = []
    for first, pieces, form in launches:
        g, h = form.grad, form.last
        if merged and merged[-1].form[0] == g and (h is None or merged[-1].form[1] in (None, h)):
            first, before, (_, known) = merged.pop()
            pieces, h = before + pieces, known if h is None else h
        merged.append(Launch(first, pieces, (g, h)))
    return merged
