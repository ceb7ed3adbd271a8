"""FSDP2 and, over two axes, HSDP: weights in shards, gathered for compute.

A rank alone computes with copies of its weights in another dtype instead, without FSDP.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import Shard

from torchmars.config import ParallelismConfig
from torchmars.core.device import is_gpu
from torchmars.models import Model
from torchmars.optim.tensors import local_part
from torchmars.parallel.cuts import UNIT_BYTES, is_one_unit, together
from torchmars.parallel.layout import Layout
from torchmars.parallel.part import ModelPart


def is_alone(layout: Layout, parallelism: ParallelismConfig) -> bool:
    """Return whether one rank has all weights where it computes: nothing is sharded or reduced.

    Its weights are plain tensors. Replicas are not alone: a mesh says who they are.
    """
    return layout.world.size == 1 and not parallelism.cpu_offload


class Copies:
    """Copies of the weights of `model` in `dtype`, which take their place as its parameters.

    FSDP keeps such copies too where one rank has whole weights, and casts the same gradients in the
    same order. But it casts unit by unit, from hooks that take the host longer than the casts take
    a GPU. All is queued on the stream that computes, so no memory is given up too early.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        # A weight that two modules share has one copy: its gradients are added up in `dtype`.
        copies = {
            weight: nn.Parameter(torch.empty_like(weight, dtype=dtype))
            for weight in model.parameters()
        }
        if torch.__version__ >= "2.15":  # FSDP takes gradients as they come, also in float32
            for copy in copies.values():
                copy.grad_dtype = None
        for module in model.modules():
            for name, weight in [*module.named_parameters(recurse=False, remove_duplicate=False)]:
                setattr(module, name, copies[weight])
        self.weights: list[Tensor] = [*copies]
        self.copies: list[Tensor] = [*copies.values()]

    @torch.no_grad()
    def follow(self) -> None:
        """Take the values of the weights, after they have changed."""
        torch._foreach_copy_(self.copies, self.weights)

    @torch.no_grad()
    def take_gradients(self) -> None:
        """Add the gradients of a backward pass to the weights' gradients, and drop them."""
        added: tuple[list[Tensor], list[Tensor]] = [], []
        first: tuple[list[Tensor], list[Tensor]] = [], []
        for weight, copy in zip(self.weights, self.copies, strict=True):
            if copy.grad is None:  # the pass did not use it
                continue
            into = added
            if weight.grad is None:
                into, weight.grad = first, torch.empty_like(weight)
            into[0].append(weight.grad)
            into[1].append(copy.grad)
            copy.grad = None
        if first[0]:
            torch._foreach_copy_(*first)
        if added[0]:
            torch._foreach_add_(*added)


def shard(
    part: ModelPart, layout: Layout, dtype: torch.dtype, parallelism: ParallelismConfig
) -> None:
    """Shard `part` in place over the `shard_mesh` of `layout`: FSDP or, with replicas, HSDP.

    Its blocks, see `gathered_together`, and the rest become units. So do a token table and a head
    that are apart: then neither is gathered while blocks compute. The float32 weights are gathered
    in `dtype` for compute, and gradients are averaged over the ranks in float32. A small part on
    CPUs is one unit, see `is_one_unit`. Experts that are dealt out over ep are units of their own
    on the `expert_shard_mesh`.
    """
    model, mesh = part.model, layout.shard_mesh
    blocks = parallelism.blocks_reshard(mesh.size(mesh.ndim - 1))
    part.keeps_gathered = blocks is False
    always = parallelism.reshard_after_forward == "always"
    on_gpu = is_gpu(mesh.device_type)
    make_unit = partial(
        fully_shard,
        # Hidden states are in `dtype` already, since the embedding's weights are. The other inputs
        # of blocks, such as the cosines of rotary positions, must stay as exact as they are.
        mp_policy=MixedPrecisionPolicy(
            param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        ),
        offload_policy=(
            CPUOffloadPolicy(pin_memory=on_gpu) if parallelism.cpu_offload else OffloadPolicy()
        ),
    )
    size = sum(parameter.numel() for parameter in part.parameters()) * dtype.itemsize
    one_unit = is_one_unit(size, layout.device.type, parallelism)
    if layout.expert_mesh is not None:
        of_experts = layout.expert_shard_mesh
        # In a part that is one unit else they stay gathered until the backward pass, as it does.
        reshard = not one_unit and parallelism.blocks_reshard(of_experts.size(of_experts.ndim - 1))
        make_experts = partial(make_unit, mesh=of_experts, reshard_after_forward=reshard)
        for mixture in model.routed().values():
            make_experts(mixture.experts, shard_placement_fn=stack_placement(of_experts))
    make_unit = partial(make_unit, mesh=mesh, shard_placement_fn=stack_placement(mesh))
    if one_unit:
        make_unit(part)
        return
    if model.output is not None:
        # The backward pass begins with the head.
        make_unit([model.norm, model.output], reshard_after_forward=always)
    tied = part.last and model.output is None
    if part.first and not tied:
        make_unit(model.tok_embed, reshard_after_forward=blocks)
    units = gathered_together(model, UNIT_BYTES[layout.device.type], dtype)
    part.blocks_of_unit = max(map(len, units), default=1)
    for unit in units:
        make_unit(unit, reshard_after_forward=blocks)
    make_unit(part, reshard_after_forward=always or None)
    prefetch_experts(units)


def gathered_together(model: Model, most: int, dtype: torch.dtype) -> list[list[Any]]:
    """Return neighbouring blocks that are gathered together, of at most `most` bytes in `dtype`.

    A larger block is alone. Experts that are units already do not count.
    """
    blocks = [*model.blocks.values()]
    sizes = []
    for block in blocks:
        units: list[Any] = expert_units(block)
        apart = {each for experts in units for each in experts.parameters()}
        gathered = (local_part(each).numel() for each in block.parameters() if each not in apart)
        sizes.append(sum(gathered) * dtype.itemsize)
    return [[blocks[place] for place in unit] for unit in together(sizes, most)]


def stack_placement(mesh: DeviceMesh) -> Callable[[nn.Parameter], Shard | None]:
    """Return how FSDP cuts parameters over the last axis of `mesh`: None for by rows, as ever.

    Stacks of matrices are cut by matrices where these divide evenly: then each is orthogonalised
    where it lies. Else the rows of each matrix are cut, where they divide: with more ranks than
    experts some ranks would have nothing.
    """
    shards = mesh.size(mesh.ndim - 1)

    def place(parameter: nn.Parameter) -> Shard | None:
        if parameter.ndim < 3 or local_part(parameter).shape[0] % shards == 0:
            return None
        return Shard(1) if parameter.shape[1] % shards == 0 else None

    return place


def prefetch_experts(units: Sequence[Sequence[Any]]) -> None:
    """Let FSDP gather ahead where experts are units of their own, inside of `units` of blocks.

    The host waits in each block for the numbers of rows that travel. What the device needs after
    must be under way by then: FSDP itself gathers a unit when the host gets there. Forward, a unit
    gathers its first experts and the next unit; backward, the unit before and its last experts.
    Between blocks of one unit, which share what they gather ahead, experts gather the next ones.
    """
    for place, unit in enumerate(units):
        own = expert_units(*unit)
        if not own:
            continue
        after, before = units[place + 1 : place + 2], units[max(place - 1, 0) : place]
        unit[0].set_modules_to_forward_prefetch([own[0], *(each[0] for each in after)])
        unit[0].set_modules_to_backward_prefetch(
            [each for other in before for each in (other[0], *expert_units(*other)[-1:])]
        )
        for one, another in pairwise(own):
            one.set_modules_to_forward_prefetch([another])
            another.set_modules_to_backward_prefetch([one])


def expert_units(*blocks: nn.Module) -> list[FSDPModule]:
    """Return the experts of some blocks that are units of their own, in order."""
    within = (each for block in blocks for each in block.modules() if each is not block)
    return [each for each in within if isinstance(each, FSDPModule)]


def set_reduction(part: ModelPart, parallelism: ParallelismConfig, last: bool) -> None:
    """Set the next backward pass's handling of gradients; `last`: it is of the last microbatch.

    Weights that a forward pass leaves gathered stay so until then.
    """
    assert isinstance(part, FSDPModule)
    kept = parallelism.accumulate
    part.set_requires_gradient_sync(last or kept != "whole")
    part.set_requires_all_reduce(last or kept == "reduced")
    part.set_reshard_after_backward(last or not part.keeps_gathered)
    part.set_is_last_backward(last)


def call_before_reduction_ends(loss: Tensor, call: Callable[[], None]) -> None:
    """Let the backward pass of `loss` call `call` when it has computed all gradients.

    What then remains of the pass is FSDP's: it reduces the gradients of the outermost unit, and
    waits for all reductions that are under way.
    """

    def queue(_: Tensor) -> None:
        # Private, torch 2.11 to 2.15. The engine keeps the order, and FSDP queues its own later.
        Variable._execution_engine.queue_callback(call)

    loss.register_hook(queue)


def weight_device(parallelism: ParallelismConfig, device: torch.device) -> torch.device:
    """Return where the weights of a rank that computes on `device` are, and so its optimizer."""
    return torch.device("cpu") if parallelism.cpu_offload else device
