"""What is known of the last gradients without reading them, and which of them a step must read.

Names: g gradient, h last gradient, s factor of the global clip, kappa strength of the correction,
c corrected gradient.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from torchmars.optim.passes import inner_products, run_pass
from torchmars.optim.plans import Plans
from torchmars.optim.reduction import Reduction
from torchmars.optim.rules.correction import strength
from torchmars.optim.rules.rule import SQUARED_NORM, GroupTensors, State, StepFactors


def read_last_grads(
    reduction: Reduction,
    groups: Sequence[GroupTensors],
    plans: Plans,
    chosen: set[Tensor],
    state: Mapping[Tensor, State],
    compile: bool,
) -> Reduction:
    """Return `reduction` with all three products of the parameters `chosen`: this reads their h.

    Those of the others are <g, g>, 0 and the known <h, h>, which say that c is not clipped.
    Collective over the ranks that share a tensor whose h is read.
    """
    partial: dict[Tensor, Tensor] = {}
    for group in groups:
        each = [
            (parameter, (g, h))
            for parameter, g, h in zip(group.parameters, group.grads, group.last_grads)
            if parameter in chosen
        ]
        no_factors = [None] * len(each)
        values = run_pass(inner_products, [pair for _, pair in each], no_factors, compile)
        partial |= zip((parameter for parameter, _ in each), values)
    zeros = torch.zeros(3, dtype=torch.float64, device=plans.device)
    places = enumerate(plans.parameters)
    read = plans.shard_sum.sum({place: partial.get(p, zeros) for place, p in places if p in chosen})
    known = torch.stack([reduction.products[p] for p in plans.parameters])
    known[:, 2] = torch.stack([state[p].get(SQUARED_NORM, zeros[0]) for p in plans.parameters])
    products = dict(zip(plans.parameters, known.unbind()))
    products |= {plans.parameters[place]: sums for place, sums in read.items()}
    return replace(reduction, products=products)


def must_be_read(
    param_groups: Sequence[Mapping[str, Any]], state: Mapping[Tensor, State], reduction: Reduction
) -> set[Tensor]:
    """Return the parameters whose h may have a say in how c is clipped. Waits for the device.

    No other c is clipped, since ||c|| <= (1 + kappa) s ||g|| + kappa ||h||. The known ||h|| is that
    before h was rounded, and differs by no more than 2 eps of the coarser dtype of g and h: round
    to nearest errs by eps / 2 of a number. One that is not known is NaN. The ranks that share a
    tensor have the same numbers: all decide alike.
    """
    chosen: set[Tensor] = set()
    if not reduction.ok:  # the step changes nothing
        return chosen
    for group in param_groups:
        parameters = [p for p in group["params"] if SQUARED_NORM in state[p]]
        if not parameters:
            continue
        kappa = strength(group["gamma"], group["betas"][0])
        dtypes = [(p.dtype, state[p]["last_grad"].dtype) for p in parameters]
        margins = [1 + 2 * max(torch.finfo(dtype).eps for dtype in each) for each in dtypes]
        g_norms = reduction.used_squared_norms(parameters).sqrt()
        h_norms = torch.stack([state[p][SQUARED_NORM] for p in parameters]).sqrt()
        bounds = (1 + kappa) * g_norms + kappa * h_norms
        bounds *= torch.tensor(margins, dtype=torch.float64)
        unclipped = bounds <= (math.inf if group["clip"] is None else group["clip"])
        chosen |= {p for p, known in zip(parameters, unclipped.tolist()) if not known}
    return chosen


def clear_unusable(updates: Iterable[tuple[GroupTensors, StepFactors]]) -> None:
    """Set to 0 each h that is unusable, before it is replaced. Waits for the device.

    kappa is 0 for them. So no pass must choose between an h that is usable and one that is not.
    """
    for group, factors in updates:
        if factors.corrections is not None:
            for h, unusable in zip(group.last_grads, factors.corrections.unusable.tolist()):
                if unusable:
                    h.zero_()


def keep_squared_norms(reduction: Reduction, state: Mapping[Tensor, State]) -> None:
    """Set the known <h, h> to s^2 <g, g>, where a counted step has made s g the next h.

    Where only some of the ranks that share a tensor had a gradient of it, the others' part of h is
    an older one: the norm is not known then.
    """
    parameters = [p for p in reduction.products if SQUARED_NORM in state[p]]
    if not parameters:
        return
    with_gradient, without = torch.stack([reduction.ranks[p] for p in parameters]).unbind(-1)
    used = torch.where(without == 0, reduction.used_squared_norms(parameters), math.nan)
    kept = [state[p][SQUARED_NORM] for p in parameters]
    values = torch.where(reduction.ok & (with_gradient > 0), used, torch.stack(kept))
    torch._foreach_copy_(kept, list(values.unbind()))
