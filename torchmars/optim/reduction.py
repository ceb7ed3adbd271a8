"""The sums of a step over all ranks: the global clip, each tensor's clip, whether it is applied."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from torchmars.optim.kernels import (
    inner_products,
    inner_products_of_stacks,
    pays_to_keep_apart,
    run_kernel,
    squared_norms,
)
from torchmars.optim.plans import Plans
from torchmars.optim.rules.correction import Corrections
from torchmars.optim.step import GroupTensors, StepFactors


@dataclass(frozen=True)
class Reduction:
    """The reduced sums of a step, in float64, and their results. The same on all ranks."""

    norm: Tensor
    """The global norm of all gradients before the clip, 0-d."""
    clips: bool
    """Whether there is a global clip."""
    scale: Tensor
    """The factor of the global clip, 0-d."""
    applied: Tensor
    """Whether the step is applied, 0-d bool: all gradients are finite."""
    products: Mapping[Tensor, Tensor]
    """<g, g>, <g, h> and <h, h> of each parameter, [3]; <g, g>, 0, 0 where h was not read. Of a
    stack <h, h> is of the entries where g is not 0."""

    def factors(self, group: GroupTensors, exact: bool, compile: bool) -> StepFactors:
        """Return the factors of `group` by the sums. `exact` and `compile`: see `MARS`."""
        steps_made = torch.stack(group.steps).double()
        products = _of(group, self.products)
        corrections, apart = None, False
        if group.last_grads:
            apart = compile and pays_to_keep_apart(group.last_grads[0], group.momenta[0])
            keep = not (exact or apart)
            products, corrections = self._corrections(group, products, steps_made, keep)
        return StepFactors(
            applied=self.applied,
            scale=self.scale.to(group.dtype),
            globally_clipped=self.clips,
            products=products,
            steps_made=steps_made,
            corrections=corrections,
            keep_apart=apart and not exact,
            compile=compile,
        )

    def _corrections(
        self, group: GroupTensors, products: Tensor, steps_made: Tensor, keep: bool
    ) -> tuple[Tensor, Corrections]:
        """Return the usable products [n, 3] of the tensors of `group`, and their corrections."""
        gg, _, hh = products.unbind(-1)
        unusable = ~hh.isfinite()  # there is no correction then, as in a first step
        products = torch.where(unusable[:, None], F.pad(gg[:, None], (0, 2)), products)
        kappa = torch.where(unusable, 0.0, (steps_made != 0).double() * group.kappa)
        clip = torch.ones_like(kappa)
        if group.settings["clip"] is not None:
            norms = corrected_squared_norms(products, self.scale, kappa).sqrt()
            clip = (group.settings["clip"] / norms).clamp(max=1.0)
        scale, kappa, clip = (each.to(group.dtype) for each in (self.scale, kappa, clip))
        applied, stacks = self.applied, group.stacks
        return products, Corrections(scale, kappa, clip, unusable, applied, keep, stacks)


def reduce_gradients(
    groups: Sequence[GroupTensors],
    plans: Plans,
    max_grad_norm: float | None,
    compile: bool,
    *,
    with_last: bool = True,
) -> Reduction:
    """Read all gradients, and sum over the ranks of the model. Collective over them.

    `with_last`: also take the products with the last gradients.
    """
    of_all = _sum_products(groups, plans, with_last, compile)
    total, products = of_all.sum(0)[0], dict(zip(plans.parameters, of_all.unbind()))
    plans.totals.settle_(total, of_all)
    norm = total.sqrt()
    scale, applied = torch.ones_like(norm), torch.isfinite(norm)
    if max_grad_norm is not None:  # as torch.nn.utils.clip_grad_norm_
        scale = torch.where(applied, (max_grad_norm / (norm + 1e-6)).clamp(max=1.0), 1.0)
    return Reduction(norm, max_grad_norm is not None, scale, applied, products)


def _sum_products(
    groups: Sequence[GroupTensors], plans: Plans, with_last: bool, compile: bool
) -> Tensor:
    """Return the products [n, 3] of all parameters, summed over their shards.

    Every rank reduces all parameters, also those that have no gradient on this one.
    """
    partial: dict[Tensor, Tensor] = {}
    for group in groups:
        if with_last and group.last_grads:
            pairs = list(zip(group.grads, group.last_grads))
            kernel = inner_products_of_stacks if group.stacks else inner_products
            of_calls = run_kernel(kernel, pairs, None, compile)
        else:
            singles = [(gradient,) for gradient in group.grads]
            on_cpu = group.grads[0].is_cpu
            of_calls = run_kernel(squared_norms, singles, None, compile and on_cpu)
        partial |= zip(group.parameters, torch.cat(of_calls).unbind())
    without = torch.zeros(3, dtype=torch.float64, device=plans.device)
    rows = [partial.get(p, without) for p in plans.parameters]
    products = torch.stack(rows) if rows else without.new_zeros(0, 3)  # of a rank without any
    plans.shard_sum.sum_(products)
    return products


def _of(group: GroupTensors, products: Mapping[Tensor, Tensor]) -> Tensor:
    """Return the products [n, 3] of the parameters of `group`."""
    return torch.stack([products[parameter] for parameter in group.parameters])


def corrected_squared_norms(products: Tensor, scale: Tensor, kappa: Tensor) -> Tensor:
    """Return ||c||^2 for c = s g + kappa (s g - h).

    c is never made for it: its 2-norm follows from three inner products, and no other norm does.

    `products` [n, 3] are those of `kernels.inner_products`, `scale` is s, `kappa` is [n].
    """
    gg, gh, hh = products.unbind(-1)
    return (
        ((1 + kappa) * scale) ** 2 * gg - 2 * kappa * (1 + kappa) * scale * gh + kappa**2 * hh
    ).clamp(min=0.0)
