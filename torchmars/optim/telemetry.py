"""The data that a step leaves for telemetry, and its numbers."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from torchmars.optim.kernels import float64_norms
from torchmars.optim.matrices.traffic import MatrixTraffic
from torchmars.optim.plans import Plans
from torchmars.optim.rules import RULES
from torchmars.optim.settings import Settings
from torchmars.optim.step import GroupTensors, State, StepFactors
from torchmars.optim.tensors import flat_parts


class GroupTelemetry(NamedTuple):
    """A group's data for telemetry: small tensors, so that gradients can be freed."""

    role: str
    """The role of the group, or its rule where it has none."""
    parameters: list[Tensor]
    scale: Tensor
    products: Tensor
    """This, and what follows, are those of `StepFactors`, and of its corrections."""
    kappa: Tensor | None
    clip: Tensor | None
    rows: list[int] | None = None
    """Those of the parameters; None: all. They are taken where somebody asks for telemetry."""

    @staticmethod
    def of(group: GroupTensors, step: StepFactors) -> "GroupTelemetry":
        """Return a step's data of a group."""
        corrections = step.corrections
        kappa, clip = (corrections.kappa, corrections.clip) if corrections else (None, None)
        return GroupTelemetry(group.role, group.parameters, step.scale, step.products, kappa, clip)

    def sums(
        self, memories: Mapping[Tensor, Tensor], deviations: Mapping[Tensor, Tensor]
    ) -> Tensor:
        """Return the sums of telemetry over tensors, [11] in float64.

        `memories` are those of `squared_memories`, `deviations` those of `deviations_of`. The sums
        are <g, g>, s^2 <g, g> and the squared memory; of tensors with a last gradient s^2 <g, g>,
        s <g, h>, <h, h>, ||c - s g||^2, how many are clipped, and how many there are; of matrices
        the squared deviations, and how many there are. s is the factor of the global clip, c the
        corrected gradient.
        """
        rows = slice(None) if self.rows is None else self.rows
        scale, (gg, gh, hh) = self.scale.double(), self.products[rows].unbind(-1)
        memory = torch.stack([memories[parameter] for parameter in self.parameters])
        measured = [deviations[each] for each in self.parameters if each in deviations]
        of_matrices = torch.stack(measured).sum(0) if measured else gg.new_zeros(2)
        sums = [gg.sum(), scale**2 * gg.sum(), memory.sum()]
        if self.kappa is None or self.clip is None:
            return torch.cat([F.pad(torch.stack(sums), (0, 6)), of_matrices])
        kappa, clip = self.kappa[rows], self.clip[rows]
        differences = (scale**2 * gg - 2 * scale * gh + hh).clamp(min=0.0)
        sums += [scale**2 * gg.sum(), scale * gh.sum(), hh.sum()]
        sums += [(kappa.double() ** 2 * differences).sum(), (clip < 1).double().sum()]
        of_corrected = torch.full_like(scale, len(clip))
        return torch.cat([torch.stack([*sums, of_corrected]), of_matrices])


def squared_memories(
    param_groups: Sequence[Settings], state: Mapping[Tensor, State], plans: Plans
) -> dict[Tensor, Tensor]:
    """Return the squared size of earlier gradients in each parameter's state.

    Collective over the ranks that share a parameter.
    """
    of_parts: list[Tensor] = []
    for group in param_groups:
        if group["params"]:
            of_parts += _squared_memories(group, [state[each] for each in group["params"]])
    memories = torch.stack(of_parts) if of_parts else torch.zeros(0)
    plans.shard_sum.sum_(memories)
    return dict(zip(plans.parameters, memories.unbind()))


def _squared_memories(group: Settings, states: Sequence[State]) -> list[Tensor]:
    """Return the squared size of earlier gradients in a rank's shards of a group, 0-d in float64.

    It is the sum of the second moment, or without one the squared norm of the momentum as an
    average: times `Rule.momentum_scale`.
    """
    names = [name for name in states[0] if name != "step"]
    if "exp_avg_sq" in names:
        return float64_norms(flat_parts(state["exp_avg_sq"] for state in states), 1)
    norms = float64_norms(flat_parts(state[names[0]] for state in states), 2)
    scale = RULES[group["rule"]].momentum_scale(group)
    return list((scale * torch.stack(norms)).square().unbind())


def deviations_of(traffic: Sequence[MatrixTraffic]) -> dict[Tensor, Tensor]:
    """Return of each matrix parameter the sum of its squared deviations, and its matrices, [2].

    Empty if the last step was not measured. Collective over the ranks that share the work.
    """
    found: dict[Tensor, Tensor] = {}
    for each in traffic:
        if each.deviations is not None:
            sums = each.deviations.clone()
            for group in each.place.groups:
                dist.all_reduce(sums, group=group)
            counts = [shape.matrix[0] * len(shape.parts) for shape in each.shapes]
            found |= zip(each.parameters, torch.stack([sums, sums.new_tensor(counts)], 1))
    return found


def report(
    grad_norm: Tensor,
    skipped: Tensor,
    groups: Sequence[GroupTelemetry],
    memories: Mapping[Tensor, Tensor],
    plans: Plans,
) -> dict[str, float]:
    """Return the result of `MARS.telemetry`. Waits for the device once.

    `memories` are those of `squared_memories`.
    """
    deviations = deviations_of(plans.traffic)
    total, in_a_row, longest = skipped.unbind()
    of_all = torch.stack([grad_norm, total.double(), longest.double(), in_a_row.double()])
    sums: dict[str, Tensor] = {}
    for group in groups:
        of_group = group.sums(memories, deviations)
        sums[group.role] = sums[group.role] + of_group if group.role in sums else of_group
    first, *rows = torch.stack([F.pad(of_all, (0, 7)), *sums.values()]).tolist()
    numbers = dict(zip(("grad_norm", "skipped_steps", "skipped_in_a_row"), first))
    for role, row in plans.totals.add_up(dict(zip(sums, rows))).items():
        if first[3]:  # the step was skipped: nothing of it is in the directions
            row[-1] = 0.0
        numbers |= {f"{role}/{name}": value for name, value in role_numbers(row).items()}
    return numbers


def role_numbers(sums: list[float]) -> dict[str, float]:
    """Return the numbers of a role, from its `GroupTelemetry.sums`."""
    gg, used, memory, kept, gh, hh, correction, clipped, tensors, deviation, matrices = sums
    numbers = {
        "grad_norm": math.sqrt(gg),
        "momentum": math.sqrt(memory / used) if used else 0.0,
    }
    if tensors:
        numbers["clipped"] = clipped / tensors
        # The first step has no last gradient, and reports 0.
        numbers["correction"] = math.sqrt(correction / kept) if kept else 0.0
        numbers["cosine"] = gh / math.sqrt(kept * hh) if kept * hh else 0.0
    if matrices:
        numbers["orthogonality"] = math.sqrt(deviation / matrices)
    return numbers


def count_skipped(skipped: Tensor, applied: Tensor) -> Tensor:
    """Return the counts of skipped steps after one more step, which may be `applied`.

    `skipped` [3] are the skipped steps in all, those in a row up to now, and the longest row since
    the interval of telemetry started.
    """
    total, row, longest = skipped.unbind()
    row = (row + 1) * ~applied
    return torch.stack([total + ~applied, row, torch.maximum(longest, row)])
