"""The data that a step leaves for telemetry, and its numbers."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from torchmars.optim.norms import ModelTotals
from torchmars.optim.step import GroupTensors, StepFactors


class GroupTelemetry(NamedTuple):
    """A group's data for telemetry: small tensors, so that gradients can be freed."""

    role: str
    """The role of the group, or its rule where it has none."""
    scale: Tensor
    products: Tensor
    """This, and what follows, are those of `StepFactors`, and of its corrections."""
    kappa: Tensor | None
    clip: Tensor | None
    rows: list[int] | None = None
    """Those of the group; None: all. They are taken where somebody asks for telemetry."""

    @staticmethod
    def of(group: GroupTensors, step: StepFactors) -> "GroupTelemetry":
        """Return a step's data of a group."""
        corrections = step.corrections
        kappa, clip = (corrections.kappa, corrections.clip) if corrections else (None, None)
        return GroupTelemetry(group.role, step.scale, step.products, kappa, clip)

    def sums(self) -> Tensor:
        """Return the sums of telemetry over tensors, [7] in float64.

        They are <g, g>, and of tensors with a last gradient s^2 <g, g>, s <g, h>, <h, h>,
        ||c - s g||^2, how many are clipped, and how many there are. s is the factor of the global
        clip, c the corrected gradient.
        """
        rows = slice(None) if self.rows is None else self.rows
        scale, (gg, gh, hh) = self.scale.double(), self.products[rows].unbind(-1)
        if self.kappa is None or self.clip is None:
            return F.pad(gg.sum()[None], (0, 6))
        kappa, clip = self.kappa[rows], self.clip[rows]
        differences = (scale**2 * gg - 2 * scale * gh + hh).clamp(min=0.0)
        sums = [gg.sum(), scale**2 * gg.sum(), scale * gh.sum(), hh.sum()]
        sums += [(kappa.double() ** 2 * differences).sum(), (clip < 1).double().sum()]
        return torch.stack([*sums, torch.full_like(scale, len(clip))])


def report(
    grad_norm: Tensor, skipped: Tensor, groups: Sequence[GroupTelemetry], totals: ModelTotals
) -> dict[str, float]:
    """Return the result of `MARS.telemetry`. Waits for the device once."""
    total, _, longest = skipped.unbind()
    of_all = torch.stack([grad_norm, total.double(), longest.double()])
    sums: dict[str, Tensor] = {}
    for group in groups:
        of_group = group.sums()
        sums[group.role] = sums[group.role] + of_group if group.role in sums else of_group
    first, *rows = torch.stack([F.pad(of_all, (0, 4)), *sums.values()]).tolist()
    numbers = dict(zip(("grad_norm", "skipped_steps", "skipped_in_a_row"), first))
    for role, row in totals.add_up(dict(zip(sums, rows))).items():
        numbers |= {f"{role}/{name}": value for name, value in role_numbers(row).items()}
    return numbers


def role_numbers(sums: list[float]) -> dict[str, float]:
    """Return the numbers of a role, from its `GroupTelemetry.sums`."""
    gg, kept, gh, hh, correction, clipped, tensors = sums
    numbers = {"grad_norm": math.sqrt(gg)}
    if tensors:
        numbers["clipped"] = clipped / tensors
        # The first step has no last gradient, and reports 0.
        numbers["correction"] = math.sqrt(correction / kept) if kept else 0.0
        numbers["cosine"] = gh / math.sqrt(kept * hh) if kept * hh else 0.0
    return numbers


def count_skipped(skipped: Tensor, applied: Tensor) -> Tensor:
    """Return the counts of skipped steps after one more step, which may be `applied`.

    `skipped` [3] are the skipped steps in all, those in a row up to now, and the longest row since
    the interval of telemetry started.
    """
    total, row, longest = skipped.unbind()
    row = (row + 1) * ~applied
    return torch.stack([total + ~applied, row, torch.maximum(longest, row)])
