"""The sums of a step over all ranks, and what follows: the global clip, and whether it counts."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torchmars.optim.passes import inner_products, run_pass, squared_norms
from torchmars.optim.plans import Plans
from torchmars.optim.rules.rule import GroupTensors


@dataclass(frozen=True)
class Reduction:
    """The reduced sums of a step, in float64, and what follows from them. The same on all ranks."""

    norm: Tensor
    """The global norm of all gradients before the clip, 0-d."""
    scale: Tensor
    """The factor of the global clip, 0-d."""
    ok: Tensor
    """Whether the step counts, 0-d bool: no gradient is broken or too large to compute with."""
    products: list[Tensor]
    """<g, g>, <g, h> and <h, h> of each parameter, in the order of `Plans.places`."""


def reduce_gradients(
    groups: Sequence[GroupTensors],
    plans: Plans,
    max_grad_norm: float | None,
    device: torch.device,
    *,
    with_last: bool,
    compile: bool,
) -> Reduction:
    """Make the first pass and its sums. Collective over the ranks of the model.

    Every rank reduces all places, also those whose parameters have no gradient on this one.
    `with_last`: also take the products with the last gradients.
    """
    partial = [torch.zeros(3, dtype=torch.float64, device=device)] * len(plans.places)
    for group in groups:
        no_factors = [None] * len(group.grads)
        if with_last and group.last_grads:
            pairs = list(zip(group.grads, group.last_grads))
            values = run_pass(inner_products, pairs, no_factors, compile)
        else:
            singles = [(gradient,) for gradient in group.grads]
            values = run_pass(squared_norms, singles, no_factors, compile)
        for parameter, value in zip(group.parameters, values):
            partial[plans.places[parameter]] = value
    products = plans.shard_sum.sum(partial)
    total = torch.stack(products).sum(0)[0]
    strains = [group.strain(plans.products_of(group.parameters, products)) for group in groups]
    strain = torch.stack([torch.zeros_like(total), *strains]).max()
    total, strain = plans.agreement.settle(torch.stack([total, strain])).unbind()
    norm = total.sqrt()
    scale, finite = torch.ones_like(norm), torch.isfinite(norm)
    if max_grad_norm is not None:  # as torch.nn.utils.clip_grad_norm_
        scale = torch.where(finite, (max_grad_norm / (norm + 1e-6)).clamp(max=1.0), 1.0)
    # A scale that float32 has no full digits for would not bring gradients to the norm.
    ok = finite & (scale * strain <= 1) & (scale >= torch.finfo(torch.float32).tiny)
    return Reduction(norm, scale, ok, products)
