"""How many machines a run may have, and with how many of them its layout and batch go."""

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

from torchmars.config import ResolvedConfig
from torchmars.core.console import labelled
from torchmars.core.errors import UserError

MOST = 100_000


class MinMax(NamedTuple):
    """The fewest and the most of what a run has: machines, or ranks."""

    fewest: int
    most: int

    @property
    def elastic(self) -> bool:
        """Whether the number may change."""
        return self.fewest < self.most

    def __str__(self) -> str:
        return f"{self.fewest}:{self.most}" if self.elastic else f"{self.most}"


def read_bounds(text: str, source: str) -> MinMax:
    """Return the number, or the bounds MIN:MAX, in the text of `source`. Raises `UserError`."""
    fewest, colon, most = text.partition(":")
    numbers = [fewest, most if colon else fewest]
    if all(re.fullmatch("[0-9]{1,6}", each) for each in numbers):
        bounds = MinMax(*map(int, numbers))
        if 1 <= bounds.fewest <= bounds.most <= MOST:
            return bounds
    raise UserError(
        f"{source} must be a whole number from 1 to {MOST}, or MIN:MAX of them as in 2:4, "
        f"got {text!r}"
    )


class UsableSizes(NamedTuple):
    """The numbers of machines, of `per_machine` ranks, with which a run goes, of those `asked`.

    They ascend. More machines are spares, which take the place of a lost one.
    """

    asked: MinMax
    usable: Sequence[int]
    per_machine: int
    microbatch_size: int  # in sequences: the same for all

    @property
    def ranks(self) -> list[int]:
        """The numbers of ranks of the usable numbers of machines."""
        return [machines * self.per_machine for machines in self.usable]

    def in_words(self) -> list[str]:
        """Return lines that tell which numbers are usable. Any other has spares."""
        machines, ranks = any_of(self.usable), any_of(self.ranks)
        more = f"microbatches of {self.microbatch_size}"
        return labelled("elastic", f"{machines} machines: {ranks} ranks; {more}")


def sizes_of(config: ResolvedConfig, asked: MinMax, per_machine: int) -> UsableSizes:
    """Return with which of the `asked` numbers of machines a run goes.

    Its layout makes their ranks, and its batch divides over them. Raises `UserError` where no
    number is usable, which tells of the largest.
    """
    training, stages = config.training, config.parallelism.stages
    shares: dict[int, int] = {}  # sequences of each rank, by machines, where the batch divides
    for machines in range(asked.fewest, asked.most + 1):
        try:
            data = config.parallelism.degrees(machines * per_machine).data
            size, steps = training.microbatches(data, stages)
        except UserError as error:
            reason = error
            continue
        shares[machines] = size * steps
    if not shares:
        raise reason
    common, least = math.gcd(*shares.values()), min(shares.values())
    size = training.microbatch_size or max(
        each for each in range(1, least // stages + 1) if common % each == 0
    )
    return UsableSizes(asked, sorted(shares), per_machine, size)


def any_of(numbers: Sequence[int]) -> str:
    """Return numbers as in "2, 3 or 4"; of many the first and the last."""
    if len(numbers) > 8:
        return f"{numbers[0]}, {numbers[1]}, ... or {numbers[-1]}"
    *first, last = map(str, numbers)
    return f"{', '.join(first)} or {last}" if first else last
