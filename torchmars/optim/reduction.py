"""The sums of a step over all ranks, and what follows: the global clip, and whether it counts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchmars.optim.passes import (
    inner_products,
    pays_to_keep_apart,
    run_pass,
    squared_norms,
)
from torchmars.optim.plans import Plans
from torchmars.optim.rules import RULES
from torchmars.optim.rules.rule import GroupTensors, State, StepFactors


def gather_gradients(
    param_groups: Sequence[dict[str, Any]],
    state: Mapping[Tensor, State],
    wire: torch.dtype,
) -> list[GroupTensors]:
    """Return the tensors of the parameters that have a gradient: of each group, by kind.

    Those of a kind have one dtype, gradients of one dtype, and state of the same names. `wire` is
    the dtype in which matrices travel.
    """
    result = []
    for group in param_groups:
        kinds: dict[Any, list[Tensor]] = {}
        for parameter in group["params"]:
            if parameter.grad is not None:
                kind = parameter.dtype, parameter.grad.dtype, *state[parameter]
                kinds.setdefault(kind, []).append(parameter)
        for parameters in kinds.values():
            states = [state[parameter] for parameter in parameters]
            result.append(GroupTensors(RULES[group["rule"]], group, parameters, states, wire))
    return result


@dataclass(frozen=True)
class Reduction:
    """The reduced sums of a step, in float64, and what follows from them. The same on all ranks."""

    norm: Tensor
    """The global norm of all gradients before the clip, 0-d."""
    clips: bool
    """Whether there is a global clip."""
    scale: Tensor
    """The factor of the global clip, 0-d."""
    ok: Tensor
    """Whether the step counts, 0-d bool: no gradient is broken or too large to compute with."""
    products: Mapping[Tensor, Tensor]
    """<g, g>, <g, h> and <h, h> of each parameter, [3]; <g, g>, 0, 0 where h was not read."""

    def factors(self, group: GroupTensors, exact: bool, compile: bool) -> StepFactors:
        """Return what the sums make of `group`. `exact` and `compile` are those of `MARS`."""
        counts = torch.stack(group.steps).double()
        momenta = group.buffers.get("exp_avg", [])
        apart = compile and any(map(pays_to_keep_apart, group.last_grads[:1], momenta))
        products, corrections = group.corrections(self.scale, _of(group, self.products), counts)
        return StepFactors(
            ok=self.ok,
            scale=self.scale.to(group.dtype),
            globally_clipped=self.clips,
            products=products,
            counts=counts,
            corrections=corrections,
            keep_gradient=not (exact or apart),
            keep_apart=apart and not exact,
            compile=compile,
        )


def reduce_gradients(
    groups: Sequence[GroupTensors],
    plans: Plans,
    max_grad_norm: float | None,
    with_last: bool,
    compile: bool,
) -> Reduction:
    """Make the first pass and its sums. Collective over the ranks of the model.

    `with_last`: also take the products with the last gradients.
    """
    products = _sum_products(groups, plans, with_last, compile)
    total = torch.stack(list(products.values())).sum(0)[0]
    strains = [group.overflow_ratio(_of(group, products)) for group in groups]
    strain = torch.stack([torch.zeros_like(total), *strains]).max()
    total, strain = plans.agreement.settle(torch.stack([total, strain])).unbind()
    norm = total.sqrt()
    scale, finite = torch.ones_like(norm), torch.isfinite(norm)
    if max_grad_norm is not None:  # as torch.nn.utils.clip_grad_norm_
        scale = torch.where(finite, (max_grad_norm / (norm + 1e-6)).clamp(max=1.0), 1.0)
    # A scale that float32 has no full digits for would not bring gradients to the norm.
    ok = finite & (scale * strain <= 1) & (scale >= torch.finfo(torch.float32).tiny)
    return Reduction(norm, max_grad_norm is not None, scale, ok, products)


def _sum_products(
    groups: Sequence[GroupTensors], plans: Plans, with_last: bool, compile: bool
) -> dict[Tensor, Tensor]:
    """Return the products of each parameter, summed over its shards.

    Every rank reduces all parameters, also those that have no gradient on this one.
    """
    partial: dict[Tensor, Tensor] = {}
    for group in groups:
        no_factors = [None] * len(group.grads)
        if with_last and group.last_grads:
            pairs = list(zip(group.grads, group.last_grads))
            values = run_pass(inner_products, pairs, no_factors, compile)
        else:
            singles = [(gradient,) for gradient in group.grads]
            values = run_pass(squared_norms, singles, no_factors, compile)
        partial |= zip(group.parameters, values)
    without = torch.zeros(3, dtype=torch.float64, device=plans.device)
    places = enumerate(plans.parameters)
    sums = plans.shard_sum.sum({place: partial.get(p, without) for place, p in places})
    return dict(zip(plans.parameters, sums.values()))


def _of(group: GroupTensors, products: Mapping[Tensor, Tensor]) -> Tensor:
    """Return the products [n, 3] of the parameters of `group`."""
    return torch.stack([products[parameter] for parameter in group.parameters])
