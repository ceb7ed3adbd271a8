"""Tensor parallelism with sequence parallelism: each layer's weights are cut over the tp ranks.

Between layers, activations are cut along the sequence, and so are the norms' inputs. Sources:
Shoeybi et al. 2019 (arXiv 1909.08053); Korthikanti et al. 2022 (arXiv 2205.05198).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import (  # private, torch 2.11 to 2.15
    AsyncCollectiveTensor,
    all_reduce,
    all_to_all_single_autograd,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from torchmars.models import Model
from torchmars.models.llama import WholeNorm
from torchmars.models.model import TensorParallelCut
from torchmars.models.moe import Experts, Router
from torchmars.parallel.cuts import cut_of
from torchmars.parallel.experts import place

SEQUENCE = 1  # the dim of hidden states [batch, length, width] that is cut between layers


def cut_layers(model: Model, mesh: DeviceMesh) -> None:
    """Cut the weights of `model`, in place, over `mesh`, which has one axis.

    `model` takes whole token ids then. Its blocks take and return a part of the sequences. `norm`
    returns whole sequences, and `head` logits whose vocabulary is cut: both are DTensors.
    """
    for name, module in model.named_modules():
        if style := style_of(name, module, model.cuts):
            parallelize_module(module, mesh, style)
    routed = model.routed()
    for mixture in routed.values():
        keep_whole(mixture.router, mesh)
        if not any(isinstance(weight, DTensor) for weight in mixture.experts.parameters()):
            keep_whole(mixture.experts, mesh)  # they are not dealt out over ep
    for number, block in model.blocks.items():
        # Each rank routes its own part of the sequences.
        mlp = routed[number].shared if number in routed else block.get_submodule("mlp")
        branches: list[Any] = [block.get_submodule("attn"), mlp]
        for branch in branches:
            if hasattr(branch, "gather"):
                branch.gather = partial(gathered_as_one, mesh=mesh)
            elif branch is not None:
                branch.register_forward_pre_hook(
                    lambda _, args: (gathered(args[0], mesh), *args[1:])
                )
    if model.tok_embed is not None:
        model.tok_embed.register_forward_hook(lambda _, args, output: Arrived.apply(output))
    if model.norm is not None:
        whole = PrepareModuleOutput(
            output_layouts=Shard(SEQUENCE),
            desired_output_layouts=Replicate(),
            use_local_output=False,
        )
        parallelize_module(model.norm, mesh, whole)


def style_of(
    name: str, module: nn.Module, cuts: dict[str, TensorParallelCut]
) -> ParallelStyle | None:
    """Return how the module called `name` is cut, a style of torch's; None: it has no weights."""
    cut = cut_of(name, cuts)
    if isinstance(module, WholeNorm):
        return WholeNormParallel()
    if cut is None:
        is_norm = isinstance(module, nn.LayerNorm | nn.RMSNorm)
        return SequenceParallel(use_local_output=True) if is_norm else None
    styles: dict[TensorParallelCut, ParallelStyle] = {
        "rows": HeadParallel() if name == "output" else ColwiseParallel(),
        "fused rows": FusedColwiseParallel(),
        "columns": RowwiseParallel(output_layouts=Shard(SEQUENCE)),
        "tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(SEQUENCE)),
        "positions": PositionParallel(),
        "whole": LocalParallel(Replicate(), part_of_sum),
        "gathered rows": LocalParallel(Shard(0), own_rows),
    }
    return styles[cut]


def gathered(x: Tensor, mesh: DeviceMesh) -> DTensor:
    """Return whole sequences from this rank's part `x` [batch, length / tp, width]."""
    part = DTensor.from_local(x, mesh, [Shard(SEQUENCE)], run_check=False)
    return part.redistribute(placements=[Replicate()])


def gathered_as_one(*parts: Tensor, mesh: DeviceMesh) -> tuple[Tensor, ...]:
    """Return whole sequences from this rank's part of each, [batch, length / tp, width].

    They travel as one. Their gradients on this rank are parts of sums over the tp ranks.
    """
    widths = [part.shape[-1] for part in parts]
    whole: Tensor = gathered(torch.cat(parts, dim=-1), mesh).to_local(grad_placements=[Partial()])
    return whole.split(widths, dim=-1)


class LocalParallel(ParallelStyle):
    """Lets a layer compute with this rank's own tensor of its weight, which `local` returns.

    What it takes and returns are no DTensors.
    """

    def __init__(self, placement: Placement, local: Callable[[Tensor], Tensor]) -> None:
        self.placement, self.local = placement, local

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> nn.Module:
        place(module, device_mesh, self.placement)
        module.local, is_layer = self.local, isinstance(module, nn.Linear)
        if is_layer:
            module.forward = lambda x: F.linear(x, self.local(module.weight))
        layer: nn.Module = module
        return layer


class WholeNormParallel(ParallelStyle):
    """Normalises over the heads of all ranks, of which each has some, as of the weight."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, WholeNorm)
        place(module, device_mesh, Shard(0))
        group, own, module.local = device_mesh.get_group(), module.mean, own_rows
        ranks = dist.get_world_size(group)
        module.mean = lambda x: SummedOverRanks.apply(own(x) / ranks, group)
        return module


class SummedOverRanks(torch.autograd.Function):
    """Sums a tensor over ranks, each of which goes on with the sum for its own heads."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return all_reduce(x, "sum", group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return all_reduce(gradients[0].contiguous(), "sum", ctx.group), None


class HeadParallel(ParallelStyle):
    """Cuts a head by rows. Its hidden states, whole, and its logits are DTensors."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        place(module, device_mesh, Shard(0))
        return module


class FusedColwiseParallel(ColwiseParallel):
    """Cuts a fused query, key and value projection by rows, and gives each rank its own heads.

    A rank has a run of rows, as of any weight that is cut by rows: checkpoints and optimizers need
    know nothing of what is fused. What it computes with them are parts of q, k or v. The ranks
    exchange them, so that each has its share of q, of k and of v.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        super()._apply(module, device_mesh)
        group = device_mesh.get_group()
        module.register_forward_hook(lambda _, args, output: exchange_parts(output, 3, group))
        return module


def exchange_parts(x: Tensor, parts: int, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's share of each of `parts` fused projections.

    Of `x` [..., parts * width / ranks] rank r has run r of the fused width. These are `parts` units
    of width / ranks each; unit u is share u % ranks of projection u // ranks.
    """
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    units = range(parts * rank, parts * (rank + 1))
    order = sorted(range(parts), key=lambda place: units[place] % ranks)
    sent = [sum(unit % ranks == other for unit in units) for other in range(ranks)]
    wanted = [projection * ranks + rank for projection in range(parts)]
    received = [sum(unit // parts == other for unit in wanted) for other in range(ranks)]
    own = x.unflatten(-1, (parts, -1))
    # Not own[..., order, :]: of a list torch makes a tensor, and a GPU waits for its copy.
    pieces = torch.stack([own[..., place, :] for place in order])
    arrived: Tensor = all_to_all_single_autograd(pieces, received, sent, group)
    return arrived.movedim(0, -2).flatten(-2)


class PositionParallel(ParallelStyle):
    """Keeps a table of positions whole, and looks up this rank's part of the sequences."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def cut(_: nn.Module, inputs: tuple[Tensor]) -> DTensor:
            positions = DTensor.from_local(inputs[0], device_mesh, [Replicate()], run_check=False)
            return positions.redistribute(placements=[Shard(positions.ndim - 1)])

        place(module, device_mesh, Replicate())
        module.register_forward_pre_hook(cut)
        module.register_forward_hook(lambda _, inputs, output: output.to_local())
        return module


def keep_whole(module: Router | Experts, mesh: DeviceMesh) -> None:
    """Keep a router or experts whole, in place, for this rank's part of the sequences."""
    place(module, mesh, Replicate())
    module.local = part_of_sum


def part_of_sum(weight: Tensor) -> Tensor:
    """Return a whole weight, whose gradient on this rank is a part of a sum over the tp ranks."""
    assert isinstance(weight, DTensor)
    return weight.to_local(grad_placements=[Partial()])


def own_rows(weight: Tensor) -> Tensor:
    """Return this rank's rows of a weight."""
    assert isinstance(weight, DTensor)
    return weight.to_local()


class Arrived(torch.autograd.Function):
    """Waits for a tensor that a collective is still filling.

    Compiled blocks (torch 2.11 to 2.15) lose the gradient of an input that is waited for inside.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        if isinstance(x, AsyncCollectiveTensor):
            return x.wait()
        return x.clone()  # FSDP2 warns of views

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]
