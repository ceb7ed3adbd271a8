"""Sizes of one model in the place of optimizers: does the best learning rate stay?"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import ClassVar

from torchmars.comparison.contenders import Contender
from torchmars.comparison.coordinates import bare, based, coordinates, exponents, sized
from torchmars.comparison.results import Kind, Settings, rate_of
from torchmars.comparison.study import Study
from torchmars.config import ResolvedConfig
from torchmars.config.load import without_none
from torchmars.core.words import table

STEPS = 4  # of the coordinate check
WITHOUT = "-without"  # ends the names of sizes that take no rates of a base
# How far from 0 the power of the width, or of the number of blocks, may be of sizes that stay. The
# gradients of other roles fall with the width, and what one block adds falls with the depth.
CHANGES = ("change of state", "change of logits")
NEAR_OF_DEPTH = dict.fromkeys(("residual stream", "attention logits", *CHANGES), 0.3)
NEAR_OF_WIDTH = dict.fromkeys((*NEAR_OF_DEPTH, "attn", "mlp"), 0.2)
NEAR_OF_WIDTH |= {"change of logits": 0.25, "gradient of matrix": 0.15, "gradient of router": 0.15}


@dataclass(frozen=True)
class SizeStudy(Study):
    """Sizes, each tuned on one grid. Other seeds get the best rate and its two neighbours."""

    kind: ClassVar[Kind] = "size"
    seed_trials: ClassVar[int] = 3

    def repeated(self, best: Settings, lrs: list[float]) -> list[Settings]:
        """Return the best settings, and those with the rate before it and after it."""
        place = lrs.index(rate_of(best))
        return [best | {"lr": lr} for lr in lrs[max(0, place - 1) : place + 2]]


def check_sizes(
    config: ResolvedConfig, widths: list[int], depths: list[int], without: bool
) -> tuple[list[str], bool]:
    """Return the coordinate check as lines, and whether all sizes of numbers stay.

    `without`: also as it is without [transfer], which decides nothing. Raises `UserError`.
    """
    config = sized(config, min(widths, default=None), min(depths, default=None))
    lines, good = [], True
    for along, numbers, near in (
        ("width", widths, NEAR_OF_WIDTH),
        ("depth", depths, NEAR_OF_DEPTH),
    ):
        for plain in (False, True)[: (len(numbers) > 1) * (1 + without)]:
            sizes = coordinates(config, numbers, along, STEPS, plain)
            powers = exponents(sizes, along)
            # A power that is no number is wrong too.
            wrong = {place for place in near if not abs(powers.get(place, 0.0)) <= near[place]}
            good = good and (plain or not wrong)
            head = f"after {STEPS} steps{', without' * plain}"
            rows = [[head, *map(str, sizes), "power"]]
            for place, power in powers.items():
                mark = " !" if place in wrong else "  "
                values = (f"{each[place]:.3g}" for each in sizes.values())
                rows.append([place, *values, f"{power:+z.2f}{mark}"])
            lines += [*table(rows, right=range(1, len(rows[0]))), ""]
    lines.append(
        "Sizes stay the same: learning rates transfer."
        if good
        else "Sizes that are marked change with the model: its learning rates may not transfer."
    )
    return lines, good


def find_sizes(
    config: ResolvedConfig, widths: Sequence[int], depths: Sequence[int], without: bool
) -> tuple[ResolvedConfig, list[Contender]]:
    """Return the config of the base, which is the smallest, and the sizes; the base first.

    Widths have the least of the depths, depths the least of the widths. Where one is empty, it is
    the config's own. `without`: each also as it is without [transfer]. Raises `UserError`.
    """
    least = min(widths, default=None), min(depths, default=None)
    base = sized(config, *least)
    pairs: list[tuple[int | None, int | None]] = [(width, least[1]) for width in sorted(widths)]
    pairs += [(least[0], depth) for depth in sorted(depths)]
    contenders = []
    for width, depth in dict.fromkeys(pairs):
        large = sized(config, width, depth)
        named = {"width": width, "depth": depth}
        name = "-".join(f"{what}{number}" for what, number in named.items() if number)
        contenders.append(contender(name, based(large, base)))
        if without and (width, depth) != least:
            contenders.append(contender(name + WITHOUT, bare(large)))
    return based(base, base), contenders


def contender(name: str, config: ResolvedConfig) -> Contender:
    """Return the contender of a size, with its [model] and [transfer]."""
    tables = without_none(asdict(config))
    own = {section: tables[section] for section in ("model", "transfer")}
    return Contender(name, tables["optimizer"], own)
