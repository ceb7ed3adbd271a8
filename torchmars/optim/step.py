"""The tensors of one step, and what follows from the sums over all gradients."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from torchmars.optim.meshes import ModelSums
from torchmars.optim.rules import RULES, Factors, Rule
from torchmars.optim.settings import Settings
from torchmars.optim.tensors import flat_parts, local_gradient

ROOT_OF_LARGEST = torch.finfo(torch.float32).max ** 0.5

State = dict[str, Tensor]  # of a parameter: "step" and the rule's buffers


class GroupTensors:
    """The parameters of one group and kind that have a gradient, for one step.

    Parameters of a kind have one dtype, gradients of one dtype, and state of the same names, and
    are stacks of matrices or not. Lists run over `parameters`. The tensors in them are local and
    flat. `dtype` is that of the computation: at least float32.
    """

    def __init__(
        self, settings: Settings, parameters: list[Tensor], states: list[State], stacks: bool
    ) -> None:
        self.settings, self.parameters, self.states = settings, parameters, states
        self.rule: Rule = RULES[settings["rule"]]
        self.role: str = settings.get("role", self.rule.name)
        self.stacks = stacks
        self.dtype = torch.promote_types(parameters[0].dtype, torch.float32)
        self.corrects = "last_grad" in states[0]
        beta1, beta2 = settings["betas"]
        gamma = settings["gamma"] if self.rule.variance_reduced else 0
        self.kappa = gamma * beta1 / (1 - beta1)
        """The strength of the correction, which a first step does not have."""
        following = settings.get("gamma_next")
        self.numbers = [
            *(settings["lr"], settings["weight_decay"], settings["eps"]),
            *(beta1, 1 - beta1, beta2, 1 - beta2),
            gamma if following is None else following,
        ]
        """Those of `Factors` from `lr` to `gamma_next`, in their order."""

    def flatten(self) -> None:
        """Make the flat tensors that torch's passes work on."""
        self.weights = flat_parts(self.parameters)
        self.grads = flat_parts(map(local_gradient, self.parameters))
        self.last_grads = (
            [] if not self.corrects else flat_parts(each["last_grad"] for each in self.states)
        )
        names = [name for name in self.states[0] if name not in ("step", "last_grad")]
        columns = (flat_parts(each[name] for each in self.states) for name in names)
        self.buffers = list(zip(*columns))
        """Of each tensor those that its rule's `momentum` makes anew."""

    def factors(self, verdict: "Verdict", columns: Sequence[Tensor], keeps: bool) -> Factors:
        """Return the factors of an update. `columns` are those [n] of the tensors."""

        # On the CPU, also for parameters on a GPU: kernels take them as arguments, so nothing is
        # copied or waited for.
        def number(value: Any) -> Tensor:
            return torch.as_tensor(value, dtype=self.dtype)

        own = {name: number(self.settings[name]) for name in self.rule.own}
        wide = (each if each.dtype == torch.bool else each.to(self.dtype) for each in columns)
        shared = verdict.applied, verdict.scale.to(self.dtype), *map(number, self.numbers)
        return Factors._make([*shared, own, self.corrects, keeps, self.stacks, *wide])


class GroupTelemetry(NamedTuple):
    """A group's data for telemetry: small tensors, so that gradients can be freed."""

    role: str
    corrects: bool
    scale: Tensor
    """The factor of the global clip, 0-d in float64, as what follows."""
    products: Tensor
    """<g, g>, <g, h> and <h, h> of each whole tensor, [n, 3]."""
    kappa: Tensor
    """[n], as `clip`: see `Factors`."""
    clip: Tensor
    rows: list[int] | None = None
    """Those of its tensors in the last three, which are of all tensors then."""


class Verdict(NamedTuple):
    """What follows from the sums of a step. The same on all ranks."""

    norm: Tensor
    """The global norm of all gradients before the clip, 0-d in float64."""
    scale: Tensor
    """The factor of the global clip, 0-d in float64."""
    applied: Tensor
    """Whether the step is applied, 0-d bool: all gradients are finite, and after the clip float32
    holds the square of their norm. Else nothing is written."""


def judged(total: Tensor, max_grad_norm: float | None) -> Verdict:
    """Return the verdict by the squared norm of all gradients, 0-d in float64."""
    norm = total.sqrt()
    scale, finite = torch.ones_like(norm), torch.isfinite(norm)
    if max_grad_norm is not None:  # as torch.nn.utils.clip_grad_norm_
        scale = torch.where(finite, (max_grad_norm / (norm + 1e-6)).clamp(max=1.0), 1.0)
    # float32 holds the square of what is left; and of the scale it has full digits.
    held = (scale * norm < ROOT_OF_LARGEST) & (scale >= torch.finfo(torch.float32).tiny)
    return Verdict(norm, scale, finite & held)


def correction_factors(
    group: GroupTensors, products: Tensor, steps_made: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the usable products [n, 3], and kappa, clip and unusable of `Factors`, [n].

    `products` [n, 3] are those of the group's whole tensors: <g, g>, <g, h> and <h, h>.
    `steps_made` [n] are the steps that each has made. All in float64, but the bools.
    """
    unusable = ~torch.isfinite(products[:, 2])
    products = torch.where(unusable[:, None], F.pad(products[:, :1], (0, 2)), products)
    kappa = torch.where(unusable, 0.0, (steps_made != 0).double() * group.kappa)
    clip = torch.ones_like(kappa)
    if group.corrects and group.settings["clip"] is not None:
        # ||c||^2 for c = s g + kappa (s g - h), which is never made for it: the 2-norm follows from
        # three inner products, and no other norm does.
        gg, gh, hh = products.unbind(-1)
        crossed = 2 * kappa * (1 + kappa) * scale * gh
        squared = ((1 + kappa) * scale) ** 2 * gg - crossed + kappa**2 * hh
        clip = (group.settings["clip"] / squared.clamp(min=0.0).sqrt()).clamp(max=1.0)
    return products, kappa, clip, unusable


def count_skipped(skipped: Tensor, applied: Tensor) -> Tensor:
    """Return the counts of `MARS.skipped` after one more step, which may be `applied`."""
    total, row, longest = skipped.unbind()
    row = (row + 1) * ~applied
    return torch.stack([total + ~applied, row, torch.maximum(longest, row)])


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
        gg, kept, gh, hh, correction, clipped, tensors = row
        numbers[f"{role}/grad_norm"] = math.sqrt(gg)
        if tensors:  # the first step has no last gradient, and reports 0
            numbers[f"{role}/clipped"] = clipped / tensors
            numbers[f"{role}/correction"] = math.sqrt(correction / kept) if kept else 0.0
            numbers[f"{role}/cosine"] = gh / math.sqrt(kept * hh) if kept * hh else 0.0
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
