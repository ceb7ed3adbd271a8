"""The matrices of a group by kernels: one launch packs a bucket of them, one steps along it."""

from collections.abc import Sequence
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from torchmars.optim.gpu import launches, tile_programs
from torchmars.optim.gpu.numbers import Given
from torchmars.optim.gpu.programs import PIECE
from torchmars.optim.gpu.table import DTYPES
from torchmars.optim.matrices.traffic import MatrixTile
from torchmars.optim.rules import RULES, MatrixRule
from torchmars.optim.step import GroupTensors
from torchmars.optim.update import MatrixUpdate


class KernelMatrices(MatrixUpdate):
    """The matrices of group `number` of a step. Their momenta are updated with all others."""

    def __init__(self, given: Given, number: int, group: GroupTensors) -> None:
        rule = RULES[group.rule]
        assert isinstance(rule, MatrixRule)
        self.rule, self.group, self.parameters = rule, group, group.parameters
        self._given, self._number = given, number

    def read(self, tiles: Sequence[MatrixTile]) -> None:
        form = self._given.table.forms[self._number]
        grad = form.grad if form.last is None else None
        self._launch(tile_programs.pack, tiles, form.first, grad)

    def apply(self, tiles: Sequence[MatrixTile]) -> None:
        weight = DTYPES[self.parameters[0].dtype]
        self._launch(tile_programs.step_along, tiles, weight)

    def _launch(self, kernel: Any, tiles: Sequence[MatrixTile], *dtypes: tl.dtype | None) -> None:
        """Launch a kernel on tiles. Their pieces are sent once: tiles of a table come again."""
        (table, fresh, numbers), first = self._given, tiles[0]
        key = kernel.__name__, self._number, first.number, first.tile.start, len(tiles)
        if key not in table.tiles:
            table.tiles[key] = launches.sent(self._pieces(tiles), fresh.device)
        pieces, packed = table.tiles[key], first.values.data_ptr()
        arguments = table.rows, fresh, pieces, numbers.values, packed, numbers.count
        form = (*dtypes, DTYPES[first.values.dtype])
        launches.launch(kernel, len(pieces), *arguments, form=form)

    def _pieces(self, tiles: Sequence[MatrixTile]) -> Tensor:
        """Return the pieces of tiles, as `tile_programs` reads them."""
        rows, base = self._given.table.rows_of[self._number], tiles[0].values.storage_offset()
        pieces, scales = [], []
        for number, tile, values in tiles:
            for start in range(0, tile.numel, PIECE.value):
                offset, left = values.storage_offset() - base + start, tile.numel - start
                pieces.append([rows[number], tile.start + start, offset, min(left, PIECE.value)])
                scales.append(self.rule.scale(*tile.units.shape))
        bits = torch.tensor(scales, dtype=torch.float64).view(torch.int64)
        return torch.cat([torch.tensor(pieces), bits[:, None]], 1)
