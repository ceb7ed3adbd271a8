"""The numbers of `MARS.telemetry`, from what a step has left."""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from torchmars.optim.meshes import ModelSums
from torchmars.optim.step import GroupTelemetry


def report(
    grad_norm: Tensor, skipped: Tensor, groups: Sequence[GroupTelemetry], model: ModelSums
) -> dict[str, float]:
    """Return the result of `MARS.telemetry`. Waits for the device once."""
    total, in_a_row, longest = skipped.unbind()
    of_all = torch.stack([grad_norm, total.double(), longest.double()])
    sums: dict[str, Tensor] = {}
    for group in groups:
        of_group = _sums(group)
        sums[group.role] = sums[group.role] + of_group if group.role in sums else of_group
    first, *rows = torch.stack([F.pad(of_all, (0, 4)), *sums.values()]).tolist()
    numbers = dict(zip(("grad_norm", "skipped_steps", "skipped_in_a_row"), first))
    for role, row in model.add_up(dict(zip(sums, rows))).items():
        numbers |= {f"{role}/{name}": value for name, value in _numbers(row).items()}
    return numbers


def _sums(group: GroupTelemetry) -> Tensor:
    """Return the sums of a group's tensors, [7] in float64.

    They are <g, g>; and of tensors with a last gradient s^2 <g, g>, s <g, h>, <h, h>,
    ||c - s g||^2, how many are clipped, and how many there are. s is the factor of the global
    clip, c the corrected gradient before its own clip.
    """
    rows = slice(None) if group.rows is None else group.rows
    scale, (gg, gh, hh) = group.scale, group.products[rows].unbind(-1)
    if not group.corrects:
        return F.pad(gg.sum()[None], (0, 6))
    kappa, clip = group.kappa[rows], group.clip[rows]
    differences = (scale**2 * gg - 2 * scale * gh + hh).clamp(min=0.0)
    sums = [gg.sum(), scale**2 * gg.sum(), scale * gh.sum(), hh.sum()]
    sums += [(kappa**2 * differences).sum(), (clip < 1).double().sum()]
    return torch.stack([*sums, torch.full_like(scale, len(clip))])


def _numbers(sums: list[float]) -> dict[str, float]:
    """Return the numbers of a role from its `_sums`."""
    gg, kept, gh, hh, correction, clipped, tensors = sums
    numbers = {"grad_norm": math.sqrt(gg)}
    if tensors:
        numbers["clipped"] = clipped / tensors
        # The first step has no last gradient, and reports 0.
        numbers["correction"] = math.sqrt(correction / kept) if kept else 0.0
        numbers["cosine"] = gh / math.sqrt(kept * hh) if kept * hh else 0.0
    return numbers
