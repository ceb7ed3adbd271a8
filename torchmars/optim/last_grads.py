"""What is known of the last gradients without reading them, and which of them a step must read.

Names: g gradient, h last gradient, s factor of the global clip, kappa strength of the correction,
c corrected gradient.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from torchmars.optim.passes import inner_products, run_pass
from torchmars.optim.plans import Plans
from torchmars.optim.reduction import Reduction
from torchmars.optim.rules.correction import strength
from torchmars.optim.rules.rule import SQUARED_NORM, GroupTensors, State


def must_be_read(
    param_groups: Sequence[Mapping[str, Any]], state: Mapping[Tensor, State], reduction: Reduction
) -> set[Tensor]:
    """Return the parameters whose h may have a say in how c is clipped. Waits for the device.

    No other c is clipped, since ||c|| <= (1 + kappa) s ||g|| + kappa ||h||. The known ||h|| is that
    before h was rounded, and differs by no more than 2 eps of the coarser dtype of g and h. One
    that is not known is NaN. The ranks that share a tensor have the same numbers: all decide alike.
    """
    chosen: set[Tensor] = set()
    for group in param_groups:
        parameters = [p for p in group["params"] if SQUARED_NORM in state[p]]
        if not parameters:
            continue
        kappa = strength(group["gamma"], group["betas"][0])
        dtypes = [(p.dtype, state[p]["last_grad"].dtype) for p in parameters]
        margins = [1 + 2 * max(torch.finfo(dtype).eps for dtype in each) for each in dtypes]
        g_norms = torch.stack([reduction.products[p][0] for p in parameters]).sqrt()
        h_norms = torch.stack([state[p][SQUARED_NORM] for p in parameters]).sqrt()
        bounds = (1 + kappa) * reduction.scale * g_norms + kappa * h_norms
        bounds *= torch.tensor(margins, dtype=torch.float64)
        unclipped = bounds <= (math.inf if group["clip"] is None else group["clip"])
        chosen |= {p for p, known in zip(parameters, unclipped.tolist()) if not known}
    return chosen


def read_last_grads(
    reduction: Reduction,
    chosen: set[Tensor],
    groups: Sequence[GroupTensors],
    plans: Plans,
    state: Mapping[Tensor, State],
    compile: bool,
) -> Reduction:
    """Return `reduction` with the products of the parameters `chosen`, which reads their h.

    Those of the others are <g, g>, 0 and the known <h, h>: enough to see that nothing is clipped.
    Collective over the shards of those chosen.
    """
    partial: dict[Tensor, Tensor] = {}
    for group in groups:
        each = list(zip(group.parameters, group.grads, group.last_grads))
        each = [(parameter, *pair) for parameter, *pair in each if parameter in chosen]
        pairs = [(g, h) for _, g, h in each]
        values = run_pass(inner_products, pairs, [None] * len(pairs), compile)
        partial |= zip((parameter for parameter, _, _ in each), values)
    zeros = torch.zeros(3, dtype=torch.float64, device=plans.device)
    read = plans.shard_sum.sum(
        [partial.get(p, zeros) if p in chosen else None for p in plans.parameters]
    )
    known = torch.stack([reduction.products[p] for p in plans.parameters])
    norms = torch.stack([state[p].get(SQUARED_NORM, zeros[0]) for p in plans.parameters])
    known = torch.cat([known[:, :2], norms[:, None]], 1)
    rows = [row if sums is None else sums for row, sums in zip(known.unbind(), read)]
    return replace(reduction, products=dict(zip(plans.parameters, rows)))


def keep_squared_norms(reduction: Reduction, state: Mapping[Tensor, State]) -> None:
    """Set the known <h, h> to s^2 <g, g>, where a counted step has made s g the next h.

    Where only some of the ranks that share a tensor had a gradient of it, the others' part of h is
    an older one: the norm is not known then.
    """
    parameters = [p for p in reduction.products if SQUARED_NORM in state[p]]
    if not parameters:
        return
    with_gradient, without = torch.stack([reduction.ranks[p] for p in parameters]).unbind(-1)
    used = torch.where(without == 0, _used_squared_norms(reduction, parameters), math.nan)
    kept = [state[p][SQUARED_NORM] for p in parameters]
    values = torch.where(reduction.ok & (with_gradient > 0), used, torch.stack(kept))
    torch._foreach_copy_(kept, list(values.unbind()))


def keep_squared_norms_ahead(reduction: Reduction, ahead: Mapping[Tensor, Tensor]) -> None:
    """Set the <h, h> `ahead` of a look-ahead, whose `reduction` is given, to s^2 <g, g>.

    Exact mode keeps zeros where there was no gradient, so the sum is right for all tensors.
    """
    if ahead:
        used = _used_squared_norms(reduction, list(ahead))
        values = torch.where(reduction.ok, used, math.nan)
        torch._foreach_copy_(list(ahead.values()), list(values.unbind()))


def _used_squared_norms(reduction: Reduction, parameters: Sequence[Tensor]) -> Tensor:
    """Return s^2 <g, g> of each of `parameters`, [n]."""
    return reduction.scale**2 * torch.stack([reduction.products[p][0] for p in parameters])
