"""What a step leaves for telemetry, and the numbers that are made of it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from torchmars.optim.norms import Agreement
from torchmars.optim.rules.correction import GroupCorrections
from torchmars.optim.rules.rule import GroupTensors, Rule, State, StepFactors
from torchmars.optim.tensors import local_part


@dataclass(frozen=True)
class GroupTelemetry:
    """What a group's update leaves for telemetry: small tensors, so that gradients can be freed."""

    role: str
    """The role of the group, or its rule where it has none."""
    rule: Rule
    parameters: list[Tensor]
    products: Tensor
    scale: Tensor
    corrections: GroupCorrections | None
    rate1: float
    """One minus the decay of the momentum."""

    @staticmethod
    def of(group: GroupTensors, step: StepFactors) -> "GroupTelemetry":
        """Return what the update of `group` leaves."""
        settings = group.settings
        return GroupTelemetry(
            role=settings["role"] if "role" in settings else settings["rule"],
            rule=group.rule,
            parameters=group.parameters,
            products=step.products,
            scale=step.scale,
            corrections=step.corrections,
            rate1=1 - settings["betas"][0],
        )

    def sums(self, state: dict[Tensor, State]) -> Tensor:
        """Return what telemetry adds up over tensors, [9] in float64.

        These are <g, g>, s^2 <g, g> and the squared memory; and of tensors with a last gradient
        s^2 <g, g>, s <g, h>, <h, h>, ||c - s g||^2, how many are clipped, and how many there are.
        s is the factor of the global clip, c the corrected gradient.
        """
        scale, gg = self.scale.double(), self.products[:, 0]
        memories = (self._memory(parameter, state[parameter]) for parameter in self.parameters)
        sums = [gg.sum(), scale**2 * gg.sum(), sum(memories, start=torch.zeros_like(scale))]
        if self.corrections is None:
            return F.pad(torch.stack(sums), (0, 6))
        kappa, clip, _ = self.corrections
        _, gh, hh = self.products.unbind(-1)
        differences = (scale**2 * gg - 2 * scale * gh + hh).clamp(min=0.0)
        sums += [scale**2 * gg.sum(), scale * gh.sum(), hh.sum()]
        sums += [(kappa.double() ** 2 * differences).sum(), (clip < 1).double().sum()]
        return torch.stack([*sums, torch.full_like(scale, len(clip))])

    def _memory(self, parameter: Tensor, state: State) -> Tensor:
        """Return the squared size of what earlier gradients left in a parameter's state.

        It is that of this rank's part, as if the parts of other ranks were alike.
        """
        share = parameter.numel() / max(local_part(parameter).numel(), 1)
        return self.rule.squared_memory(state, self.rate1) * share


def report(
    grad_norm: Tensor,
    skipped: Tensor,
    groups: Sequence[GroupTelemetry],
    measured: bool,
    state: dict[Tensor, State],
    agreement: Agreement,
) -> dict[str, float]:
    """Return what `MARS.telemetry` returns. Waits for the device once.

    `measured`: the step read all last gradients.
    """
    total, _, longest = skipped.unbind()
    of_all = torch.stack([grad_norm, total.double(), longest.double()])
    sums: dict[str, Tensor] = {}
    for group in groups:
        of_group = group.sums(state)
        sums[group.role] = sums[group.role] + of_group if group.role in sums else of_group
    first, *rows = torch.stack([F.pad(of_all, (0, 6)), *sums.values()]).tolist()
    numbers = dict(zip(("grad_norm", "skipped_steps", "skipped_in_a_row"), first))
    for role, row in agreement.add_up(dict(zip(sums, rows))).items():
        numbers |= {f"{role}/{name}": value for name, value in role_numbers(row, measured).items()}
    return numbers


def role_numbers(sums: list[float], measured: bool) -> dict[str, float]:
    """Return the numbers of a role, from its `GroupTelemetry.sums`."""
    gg, used, memory, kept, gh, hh, correction, clipped, tensors = sums
    numbers = {
        "grad_norm": math.sqrt(gg),
        "momentum": math.sqrt(memory / used) if used > 0 else 0.0,
    }
    if tensors:
        numbers["clipped"] = clipped / tensors
    if tensors and measured:
        # The first step has no last gradient, and reports 0.
        numbers["correction"] = math.sqrt(correction / kept) if kept > 0 else 0.0
        numbers["cosine"] = gh / math.sqrt(kept * hh) if kept * hh > 0 else 0.0
    return numbers


def count_skipped(skipped: Tensor, ok: Tensor) -> Tensor:
    """Return the counts of skipped steps after one more step, which counts if `ok`.

    `skipped` [3] are the skipped steps in all, those in a row up to now, and the longest row since
    the interval of telemetry started.
    """
    total, row, longest = skipped.unbind()
    row = (row + 1) * ~ok
    return torch.stack([total + ~ok, row, torch.maximum(longest, row)])
