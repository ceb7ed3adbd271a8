"""Expert parallelism: experts are dealt out over ranks, and tokens travel to them and back.

No token is dropped, so which rank has an expert changes no token's output but by the rounding of
products with other numbers of rows. Source: Lepikhin et al. 2020 (arXiv 2006.16668), without its
capacity.
"""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import (  # private, torch 2.11 to 2.15
    all_to_all_single,
    all_to_all_single_autograd,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard, distribute_tensor

from torchmars.models import Model
from torchmars.models.moe import Experts, TakenRows
from torchmars.parallel.layout import Layout


def deal_out_experts(model: Model, layout: Layout) -> None:
    """Give each rank of the ep group its experts of each block of `model`, in place.

    FSDP then averages gradients over the ranks that have the same experts, and not over those of
    the ep group, whose tokens are in a rank's gradient already. But the loss is the mean over all
    ranks that compute different tokens. So gradients are scaled by tp / ep before.
    """
    assert layout.expert_mesh is not None
    mesh, scale = layout.expert_mesh["ep"], layout.group("tp").size / layout.group("ep").size
    for mixture in model.routed().values():
        place(mixture.experts, mesh, Shard(0))
        mixture.experts.local = partial(own_experts, scale=scale)
        mixture.dispatch = Dispatch(mesh.get_group())


def place(module: nn.Module, mesh: DeviceMesh, placement: Placement) -> None:
    """Place the weights of a layer on `mesh`, which has one axis: `Shard(0)` cuts them by rows."""
    for name, weight in list(module.named_parameters()):
        module.register_parameter(name, nn.Parameter(distribute_tensor(weight, mesh, [placement])))


def own_experts(stack: Tensor, scale: float) -> Tensor:
    """Return this rank's part of a stack, whose gradient is multiplied by `scale`."""
    assert isinstance(stack, DTensor)
    scaled: Tensor = ScaledGradient.apply(stack.to_local(), scale)
    return scaled


class ScaledGradient(torch.autograd.Function):
    """The identity, whose gradient is scaled."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * ctx.scale, None


class Dispatch:
    """Sends rows to the ranks of their experts, and the outputs back: takes `at_home`'s place.

    Every rank of the group makes the same calls, also without rows. The host waits for the numbers
    of rows that will arrive.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.ranks = group, dist.get_world_size(group)

    def __call__(self, experts: Experts, rows: Tensor, counts: Tensor) -> Tensor:
        """Return the outputs of `rows` [rows, width], sorted by expert: `counts` [experts] each."""
        leaving = counts.view(self.ranks, -1)
        arriving = all_to_all_single(counts, None, None, self.group).view_as(leaving)
        sent, received = self.splits(leaving, arriving)
        arrived = all_to_all_single_autograd(rows, received, sent, self.group)
        # They come by rank, and from each rank by expert.
        own = torch.arange(leaving.shape[1], device=counts.device).repeat(self.ranks)
        own = own.repeat_interleave(arriving.flatten(), output_size=sum(received))
        order = own.argsort(stable=True)
        places = order.argsort()
        outputs = experts(TakenRows.apply(arrived, order, places), arriving.sum(dim=0))
        outputs = TakenRows.apply(outputs, places, order)
        returned: Tensor = all_to_all_single_autograd(outputs, sent, received, self.group)
        return returned

    def splits(self, leaving: Tensor, arriving: Tensor) -> list[list[int]]:
        """Return how many rows go to each rank, and how many come from each. Waits for the device.

        Both are [ranks, experts of one rank]: of each rank's experts, and of this rank's.
        """
        numbers: list[list[int]] = torch.stack([leaving.sum(1), arriving.sum(1)]).tolist()
        return numbers
