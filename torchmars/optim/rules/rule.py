"""What an update rule is, and what it works on in a step."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from torchmars.optim.passes import KeepFactors, keep_gradient_, run_pass
from torchmars.optim.rules.correction import (
    GroupCorrections,
    TensorCorrection,
    corrected_squared_norms,
    strength,
)
from torchmars.optim.tensors import flat, local_gradient, local_part

Settings = dict[str, Any]  # of an optimizer by its name, or of a parameter group
State = dict[str, Tensor]  # of a parameter: "step" and the rule's buffers
MOMENTA = ("exp_avg", "momentum", "momentum_buffer")
"""The names of momenta. A rule has one of them."""


class Rule(ABC):
    """An update rule: its name, its settings, its buffers, and when its numbers overflow.

    To add one, derive from `ElementwiseRule` or `matrix.MatrixRule` in a file of its own, and name
    it in `rules.RULES`. Rules have no state of their own.
    """

    name: ClassVar[str]
    defaults: ClassVar[Mapping[str, Any]]
    """Every setting of the optimizer of this name, with its default: published where there is a
    published one, for GPT-2 small."""
    corrected: ClassVar[bool] = False
    """Whether the gradient is variance-reduced (MARS): the rule then takes `gamma` and `clip`."""
    continues: ClassVar[Sequence[str]] = ()
    """Other rules whose saved state this one can go on from."""
    former_names: ClassVar[Mapping[str, str]] = {}
    """Today's names of buffers, by those they were once saved under."""
    counts_steps: ClassVar[bool] = False
    """Whether `update` increments the step counts itself."""

    @abstractmethod
    def buffers(self, clip: float | None, exact: bool) -> tuple[str, ...]:
        """Return the names of the state tensors that are as large as the parameter.

        "exp_avg", "exp_avg_sq" and "last_grad" mean the same under every rule that has them.
        "momentum" means something else under each, and is only read by the rule that wrote it.
        """

    def settings_by_role(self, main: Settings, settings: Settings) -> dict[str, Settings]:
        """Return the group settings of those roles whose settings are not `main`.

        `settings` are those of the optimizer, as `param_groups.complete_settings` returns them.
        """
        return {"vector": main | {"weight_decay": 0.0}}

    def limits(self, group: "GroupTensors", wire: torch.dtype) -> list[float]:
        """Return bounds on the norm of a tensor's (corrected) gradient, below which all is finite.

        By default no buffer is taken to hold larger numbers than the gradient. A rule whose buffers
        or other numbers are larger adds bounds. `wire` is the dtype in which matrices travel.
        """
        kept = [group.parameters, *(group.buffers.get(name, []) for name in MOMENTA)]
        return [min(torch.finfo(each[0].dtype).max for each in kept if each) / 2]

    def squared_memory(self, state: State, rate1: float) -> Tensor:
        """Return the squared size of what earlier gradients left in this rank's part of `state`.

        The sum over a tensor's shards is that of the whole. It is by default the squared norm of
        the first of the rule's `buffers`. `rate1` is one minus the momentum's decay. The result is
        0-d, in float64.
        """
        momentum = next(value for name, value in state.items() if name != "step")
        return torch.linalg.vector_norm(local_part(momentum), dtype=torch.float64).square()

    def former_scale(self, betas: Sequence[float]) -> float:
        """Return the factor that buffers of `former_names`, saved under `betas`, had."""
        return 1.0


class ElementwiseRule(Rule):
    """A rule that updates each element of a tensor on its own."""

    @abstractmethod
    def update(self, group: "GroupTensors", step: "StepFactors") -> None:
        """Update the weights and the state of `group` in place, where `step.ok`."""


class GroupTensors:
    """The parameters of one group and dtype that have a gradient, for one step.

    Lists run over `parameters`. The tensors in them are local and flat. `dtype` is that of the
    computation: at least float32. Raises `ValueError` if the per-tensor clip was switched on after
    the state was made without a last gradient.
    """

    def __init__(
        self,
        rule: Rule,
        settings: Settings,
        parameters: list[Tensor],
        states: list[State],
        wire: torch.dtype,
    ) -> None:
        self.rule, self.settings, self.parameters = rule, settings, parameters
        self.dtype = torch.promote_types(parameters[0].dtype, torch.float32)
        self.weights = [flat(local_part(p)) for p in parameters]
        self.grads = [flat(local_gradient(p)) for p in parameters]
        self.steps = [state["step"] for state in states]
        self.buffers = {
            name: [flat(local_part(state[name])) for state in states]
            for name in states[0]
            if name != "step"
        }
        self.last_grads = self.buffers.get("last_grad", [])
        if rule.corrected and not self.last_grads and settings["clip"] is not None:
            raise ValueError(
                "clip cannot be switched on after the optimizer was created without it: "
                "no last gradient was kept"
            )
        self.largest_norm = self._largest_norm(wire)

    def _largest_norm(self, wire: torch.dtype) -> float:
        """Return the largest norm of a tensor's gradient, after the global clip, without overflow.

        No entry is larger than the norm. While h is no larger than g may be, a correction and all
        that leads to it stay below 2 (1 + kappa) ||g||.
        """
        most, clip = min(self.rule.limits(self, wire)), self.settings["clip"]
        if self.last_grads and clip is not None and clip <= most:
            most = torch.finfo(self.dtype).max / 2  # the clip comes before any of these
        most /= 2 * (1 + self._strength())
        return min([most, *(torch.finfo(last_grad.dtype).max for last_grad in self.last_grads[:1])])

    def _strength(self) -> float:
        """Return kappa, but for a first step, where there is no correction."""
        return (
            strength(self.settings["gamma"], self.settings["betas"][0])
            if self.rule.corrected
            else 0.0
        )

    def overflow_ratio(self, products: Tensor) -> Tensor:
        """Return the largest norm of the gradients, before the global clip, over `largest_norm`.

        `products` [n, 3] are the reduced ones.
        """
        return products[:, 0].sqrt().max() / self.largest_norm

    def scalar(self, value: float | Tensor) -> Tensor:
        """Return `value` as a 0-d tensor in the dtype of the computation.

        It is on the CPU, also for parameters on a GPU: kernels take it as an argument, so nothing
        is copied or waited for.
        """
        return torch.as_tensor(value, dtype=self.dtype)

    def corrections(
        self, scale: Tensor, products: Tensor, counts: Tensor
    ) -> tuple[Tensor, GroupCorrections | None]:
        """Return the usable products [n, 3] of the tensors, and their corrections.

        `scale` is the global clip's factor in float64, `products` are the reduced ones, `counts`
        the steps made. There are no corrections where no last gradient is kept.
        """
        if not self.last_grads:
            return products, None
        gg, _, hh = products.unbind(-1)
        # Not finite, or too large: there is no correction then, as in a first step.
        unusable = ~(hh.sqrt() <= self.largest_norm)
        products = torch.where(unusable[:, None], F.pad(gg[:, None], (0, 2)), products)
        kappa = torch.where(unusable, 0.0, (counts != 0).double() * self._strength())
        clip = torch.ones_like(kappa)
        if self.settings["clip"] is not None:
            norms = corrected_squared_norms(products, scale, kappa).sqrt()
            clip = (self.settings["clip"] / norms).clamp(max=1.0)
        return products, GroupCorrections(kappa.to(self.dtype), clip.to(self.dtype), unusable)


@dataclass(frozen=True)
class StepFactors:
    """What the reduced sums of a step make of one group. Factors are in its computation's dtype."""

    ok: Tensor
    """Whether the step counts: the condition of each write. Where it is false nothing changes.
    0-d, bool."""
    scale: Tensor
    """The factor of the global clip, 0-d."""
    globally_clipped: bool
    """Whether there is a global clip."""
    products: Tensor
    """<g, g>, <g, h> and <h, h> of each whole tensor, [n, 3] in float64."""
    counts: Tensor
    """The steps that each tensor has made, [n] in float64."""
    corrections: GroupCorrections | None
    """None if no last gradient is kept."""
    keep_gradient: bool
    """Whether the rule's pass makes the gradient just used the last gradient."""
    keep_apart: bool
    """Whether a pass of its own does: `keep_gradients`."""
    compile: bool
    """Whether large tensors go through compiled kernels."""

    def correction_of_each(self) -> list[TensorCorrection]:
        """Return the correction of each tensor. Only where last gradients are kept."""
        assert self.corrections is not None
        return self.corrections.of_each(self.scale)

    def keep_gradients(self, group: "GroupTensors") -> None:
        """Make the gradients just used the last gradients, where the rule's pass has not."""
        if self.keep_apart:
            pairs = list(zip(group.grads, group.last_grads))
            factors = [KeepFactors(self.scale, self.ok)] * len(pairs)
            run_pass(keep_gradient_, pairs, factors, self.compile)
