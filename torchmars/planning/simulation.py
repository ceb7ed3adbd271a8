"""One step of one rank of a run, made without its ranks and without memory: what it holds, and what it sends.

The model, its sharding and the optimizer are the run's own. Tensors are torch's fake ones, which have a shape and no values, and so are
the collectives.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses import FakeTensorMode  # private, torch 2.11 to 2.13
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker  # private, torch 2.11 to 2.13
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode  # private, torch 2.11 to 2.13

from torchmars.checkpoint.state import training_state
from torchmars.config import ResolvedConfig
from torchmars.models import GPT2, build_meta_model
from torchmars.optim import MARS
from torchmars.parallel.layout import Layout
from torchmars.parallel.recipe import parallelize
from torchmars.training.build import build_optimizer
from torchmars.training.step import backward

GATHERED = (
    "Unsharded Param",
    "Unsharded Grad",
    "All Gather",
    "Reduce Scatter",
)  # FSDPMemTracker's names

# What a rank sends, as a part of the whole tensor, by the best known algorithms (rings): Thakur et al. 2005.
PARTS = {
    "all-gather": lambda ranks: (ranks - 1) / ranks,
    "reduce-scatter": lambda ranks: (ranks - 1) / ranks,
    "all-reduce": lambda ranks: 2 * (ranks - 1) / ranks,
}


@dataclass(frozen=True)
class Kind:
    """A kind of traffic: what is done, in which phase of a step, among which ranks."""

    phase: str
    operation: str
    ranks: tuple[int, ...]


@dataclass
class Simulation:
    """What a step takes of one rank, in bytes."""

    model: GPT2
    optimizer: MARS
    weights: int
    gradients: int
    optimizer_state: int
    activations: int
    """At the peak of the forward and backward pass: activations and temporary tensors."""
    gathered: int
    """At that peak: weights and gradients of other ranks' shards, and the buffers they travel through."""
    checkpoint: int
    """Of a whole checkpoint, of all ranks together."""
    times: Counter[Kind]
    """How often the rank takes part in a kind of traffic."""
    sent: Counter[Kind]
    """What it sends of that kind."""

    @property
    def peak(self) -> int:
        """All that the rank holds at the worst moment of a step. The optimizer's own temporary tensors are small beside activations."""
        return (
            self.weights
            + self.optimizer_state
            + max(self.activations + self.gathered, self.gradients)
        )


def simulate_step(config: ResolvedConfig, layout: Layout, vocab_size: int) -> Simulation:
    """Make one step of the rank that `layout`, made by `Layout.simulate`, stands for.

    `config` is one with resolved dtypes. Raises `UserError` where it does not fit the layout.
    """
    microbatch_size, accumulation_steps = config.training.microbatches(layout.data.size)
    model = build_meta_model(config.model, vocab_size, config.training.seq_len)
    parallelize(model, layout.shard_mesh, getattr(torch, config.training.dtype), compile=False)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with fake:
        model.to_empty(device="cpu")
    optimizer = build_optimizer(
        config, model
    )  # not in the fake mode: the ranks compare their plans, which takes values
    optimizer.compile = False
    state = [tensor for each in optimizer.state.values() for tensor in each.values()]
    checkpoint = sum(
        tensor.numel() * tensor.itemsize * (layout.world.size if name.startswith("rng.") else 1)
        for name, tensor in training_state(layout, model, optimizer).items()
    )

    tracker, wire = FSDPMemTracker(model), Wire()
    passes = 2 if optimizer.exact else 1
    with fake, wire:
        with tracker:
            model.register_forward_pre_hook(
                lambda *_: tracker.reset_mod_stats(), prepend=True
            )  # else it refuses a second pass
            # All microbatches but the last are alike, so a step of n is n - 1 times a step of two less n - 2 times a step of one.
            tokens = torch.zeros(microbatch_size, config.training.seq_len + 1, dtype=torch.int64)
            wire.weight = passes * (2 - accumulation_steps)
            backward(model, [tokens])
            if accumulation_steps > 1:
                optimizer.zero_grad()
                wire.weight = passes * (accumulation_steps - 1)
                backward(model, [tokens] * 2)
        gradients = held(parameter.grad for parameter in model.parameters())
        wire.phase, wire.weight = "optimizer", 1
        if optimizer.exact:
            optimizer.look_ahead()
        optimizer.step()
    peak = next(iter(tracker.get_tracker_snapshot("peak").values()))
    gathered = sum(peak[name] for name in GATHERED)
    if (
        accumulation_steps > 1
    ):  # the whole gradient, in float32, which the tracker takes for temporary tensors
        gathered += 4 * sum(parameter.numel() for parameter in model.parameters())
    return Simulation(
        model,
        optimizer,
        held(model.parameters()),
        gradients,
        held(state) + held(optimizer.ahead.values()),
        peak["Total"] - peak["Sharded Param"] - gathered,
        gathered,
        checkpoint,
        wire.times,
        wire.sent,
    )


class Wire(TorchDispatchMode):
    """Counts the collectives of this rank, each `weight` times, under the phase it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.phase, self.weight = "forward and backward", 1
        self.times: Counter[Kind] = Counter()
        self.sent: Counter[Kind] = Counter()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op.namespace == "c10d":
            self._count(op._schema.name.removeprefix("c10d::").strip("_"), args)
        return op(*args, **(kwargs or {}))

    def _count(self, name: str, args: Any) -> None:
        """The argument lists are those of torch.ops.c10d, torch 2.11 to 2.13."""
        group = next(
            dist.ProcessGroup.unbox(each)
            for each in args
            if isinstance(each, torch.ScriptObject) and "ProcessGroup" in str(each._type())
        )
        ranks = tuple(dist.get_process_group_ranks(group))
        if name == "alltoall_base":
            operation, (_, tensor, _, _, pieces) = "all-to-all", args[:5]
            sent = (
                tensor.nbytes * (1 - pieces[group.rank()] / max(sum(pieces), 1))
                if pieces
                else tensor.nbytes * (1 - 1 / len(ranks))
            )
        else:
            operation, whole = {
                "allgather_base": ("all-gather", args[0]),
                "reduce_scatter_base": ("reduce-scatter", args[1]),
                "allreduce": ("all-reduce", args[0]),
            }[name]
            sent = sum(
                tensor.nbytes for tensor in (whole if isinstance(whole, list) else [whole])
            ) * PARTS[operation](len(ranks))
        self.times[Kind(self.phase, operation, ranks)] += self.weight
        self.sent[Kind(self.phase, operation, ranks)] += self.weight * round(sent)


def held(tensors: Iterable[Tensor | None]) -> int:
    """Bytes of memory that this rank's parts of `tensors` lie in."""
    storages = {}
    for tensor in tensors:
        if tensor is not None:
            storage = (
                tensor.to_local() if isinstance(tensor, DTensor) else tensor
            ).untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())
