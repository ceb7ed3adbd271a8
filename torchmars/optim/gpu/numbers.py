"""The numbers that a step leaves on the device, and what telemetry makes of them."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from torchmars.optim.gpu import launches, programs
from torchmars.optim.gpu.table import Table
from torchmars.optim.rules.correction import Corrections
from torchmars.optim.step import StepFactors


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


class Given(NamedTuple):
    """What all kernels of a step are given."""

    table: Table
    fresh: Tensor
    """What may change in a step: the gradients' addresses, and the groups' settings."""
    numbers: Numbers


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
