"""The numbers of a step on the device, and the arguments of its kernels."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from torchmars.optim.gpu import programs
from torchmars.optim.gpu.table import AddressTable


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
    """The arguments of all kernels of a step."""

    table: AddressTable
    fresh: Tensor
    """Inputs that may change in a step: the gradients' addresses, and the groups' settings."""
    numbers: Numbers
