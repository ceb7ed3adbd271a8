"""Where the tensors of an optimizer lie, and in which pieces the kernels work on them."""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from torchmars.optim.gpu.programs import BEGIN, PIECE
from torchmars.optim.rules import RULES, Rule
from torchmars.optim.rules.adamw import AdamW, MarsAdamW
from torchmars.optim.rules.lion import Lion, MarsLion
from torchmars.optim.rules.matrix import MarsM, MarsShampoo, Muon
from torchmars.optim.step import GroupTensors, State
from torchmars.optim.tensors import innermost

DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
MATRICES = (MarsM, MarsShampoo, Muon)
# How momentum and weights follow from the gradient. A rule that derives from one of these may do it
# in another way.
KINDS: dict[type[Rule], str] = {
    AdamW: "adamw",
    MarsAdamW: "adamw",
    Lion: "sign",
    MarsLion: "sign",
} | dict.fromkeys(MATRICES, "momentum")


class Form(NamedTuple):
    """How kernels of the second pass differ: the `form` of `update`."""

    kind: str
    """One of `KINDS`, with "lean " before it where a lean momentum is kept."""
    weight: tl.dtype | None
    """None: weights are not updated here."""
    grad: tl.dtype
    last: tl.dtype | None
    first: tl.dtype
    second: tl.dtype | None

    @staticmethod
    def of(group: GroupTensors) -> "Form":
        """Return the form of a group. Raises `KeyError` for a rule or a dtype without kernels."""
        state, rule = group.states[0], type(RULES[group.rule])
        kind = KINDS[rule]
        lean = kind in ("sign", "momentum") and not group.corrects
        gradient, second = group.parameters[0].grad, state.get("exp_avg_sq")
        assert gradient is not None
        return Form(
            f"lean {kind}" if lean else kind,
            None if rule in MATRICES else DTYPES[group.parameters[0].dtype],
            DTYPES[gradient.dtype],
            DTYPES[state["last_grad"].dtype] if group.corrects else None,
            DTYPES[state[group.names[0]].dtype],
            None if second is None else DTYPES[second.dtype],
        )


class Launch(NamedTuple):
    """Which pieces a launch works on: so many, from the `first` on."""

    first: int
    pieces: int
    form: Any


class AddressTable:
    """The rows of all parameters of an optimizer, and the pieces of those that have a gradient.

    They hold while the addresses and the groups of a step stay as they are.
    """

    def __init__(self, parameters: Sequence[Tensor], groups: Sequence[GroupTensors]) -> None:
        forms = [Form.of(group) for group in groups]
        # Neighbours share launches. Where no last gradient is read, any dtype of one will do.
        order = sorted(
            range(len(groups)),
            key=lambda each: (str(forms[each].grad), str(forms[each].last), str(forms[each])),
        )
        place = {parameter: row for row, parameter in enumerate(parameters)}
        self.forms = forms  # of the groups
        self.tiles: dict[tuple, Tensor] = {}
        """Pieces of tiles of matrices, for each list of tiles that an exchange has."""
        self.rows_of = [[place[each] for each in group.parameters] for group in groups]
        columns = [[0] * 10 for _ in parameters]
        of_rows: list[int] = []
        launches, first = [], 0
        for number in order:
            group, begin = groups[number], first
            for row, parameter, each in zip(self.rows_of[number], group.parameters, group.states):
                pieces = -(-innermost(parameter).numel() // PIECE.value)
                pieces_of_row = first, first + pieces
                columns[row] = [*_columns(parameter, group, each, number), *pieces_of_row]
                of_rows += [row] * pieces
                first += pieces
            launches.append(Launch(begin, first - begin, forms[number]))
        self.rows = torch.tensor(columns, dtype=torch.int64).view(len(columns), 10).T.contiguous()
        rows = torch.tensor(of_rows, dtype=torch.int64)
        numbers = torch.arange(first) - self.rows[BEGIN.value][rows]  # among those of a row
        self.pieces = torch.stack([rows, numbers * PIECE.value], 1)
        self.sums = _sum_launches(launches)
        self.updates = [
            Launch(some[0].first, sum(each.pieces for each in some), form)
            for form, alike in itertools.groupby(launches, lambda each: each.form)
            for some in [list(alike)]
        ]

    def check_wires(self, wires: Iterable[torch.dtype]) -> None:
        """Raise `KeyError` for a dtype that matrices travel in and kernels do not know."""
        for wire in wires:
            DTYPES[wire]


def _columns(parameter: Tensor, group: GroupTensors, state: State, number: int) -> list[int]:
    """Return the columns of a parameter's row, except its pieces: see `programs`.

    Raises `KeyError` for state that somebody has replaced by what is not as the others.
    """
    names = (group.names[0], "exp_avg_sq", "last_grad", "step")
    like = innermost(parameter)
    for name in names[:3]:
        if name in state:
            buffer = innermost(state[name])
            if buffer.dtype != group.states[0][name].dtype or buffer.stride() != like.stride():
                raise KeyError(name)
    if state["step"].dtype != torch.float32:
        raise KeyError("step")
    addresses = [innermost(state[name]).data_ptr() if name in state else 0 for name in names]
    return [like.data_ptr(), *addresses, like.numel(), group.stacks, number + 1]


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
