"""The memory, traffic and time of a run, before it has a cluster: all by formula."""

from functools import cached_property

import torch

from torchmars.cluster.sizes import UsableSizes
from torchmars.config import ResolvedConfig
from torchmars.config.ranks import resolve_compile
from torchmars.core.device import gpu_memory
from torchmars.core.errors import UserError
from torchmars.parallel.checks import check_layout
from torchmars.planning.memory import LayoutMemory, ModelCosts
from torchmars.planning.traffic import OF_LAYERS, Ranks, Sent, owners_of, traffic_of
from torchmars.records.gpus import GIB

# The cluster that plans assume: H100s, eight on a machine, and a good network.
GPU_GIB = 80
RESERVED = 8 * GIB  # of each GPU: CUDA, NCCL and a fragmented allocator
MEMORY = GPU_GIB * GIB - RESERVED  # the rest of it
FLOPS = 400e12  # per second, that the training of large models reaches in bfloat16
NETWORK = 50e9  # bytes per second of each GPU between machines: 400 Gb/s
NVLINK = 350e9  # bytes per second of each GPU within a machine, that collectives reach
SPEEDS = (  # in words
    f"{FLOPS / 1e12:.0f} TFLOP/s of each GPU, {NVLINK / 1e9:.0f} GB/s within a machine and "
    f"{NETWORK / 1e9:.0f} GB/s between machines"
)
# What activation checkpointing adds to a backward pass, in forward passes.
AGAIN = {"none": 0.0, "selective": 0.2, "full": 1.0}


class Plan(LayoutMemory):
    """The memory, traffic and time of a model's run on one layout: `plan_run` makes it."""

    def __init__(self, costs: ModelCosts, config: ResolvedConfig, world_size: int) -> None:
        """`config` has resolved dtypes. Raises `UserError` if it does not divide."""
        self.world_size, self.per_node, self.whole = world_size, costs.per_node, costs.model
        self.flops = costs.flops * config.training.tokens_per_step * config.optimizer.passes
        """FLOPs of the forward and backward passes of a step, with exact mode's look-ahead."""
        degrees = config.parallelism.degrees(world_size)
        check_layout(config, degrees, costs.model)
        device = torch.device(costs.device)
        super().__init__(costs, resolve_compile(config, device, True, degrees.tp, None), degrees)

    @property
    def checkpoint(self) -> int:
        """Bytes of a checkpoint, of all ranks together. Each has its own generators."""
        weights = 4 * self.whole.parameter_count * (2 if self.config.training.ema_decay else 1)
        states = self.costs.optimizer.state.values()
        state = sum(tensor.nbytes for each in states for tensor in each.values())
        buffers = sum(buffer.nbytes for buffer in self.whole.buffers())
        counts = 8 * self.whole.experts * len(self.whole.routed()) * self.config.optimizer.passes
        generators = torch.get_rng_state().nbytes + 16 * (self.per_node > 0)  # of a GPU
        skipped = self.costs.optimizer.skipped.nbytes
        return weights + state + buffers + counts + skipped + generators * self.world_size

    @cached_property
    def bubble(self) -> float:
        """The part of a step that the ranks of a pipeline wait for each other, their mean.

        (p - 1) / (n + p - 1) if all stages cost the same: Narayanan et al. 2021, arXiv 2104.04473,
        section 2.2. More if a rank has more to do.
        """
        pp, rounds = self.degrees.pp, self.microbatches[1] * len(self.ranks[0].stages)
        loads = [float(len(rank.blocks)) for rank in self.ranks]
        loads[-1] += self.costs.head_in_blocks  # the last stage is the last rank's
        return 1 - sum(loads) / pp / max(loads) * rounds / (rounds + pp - 1)

    @cached_property
    def passes(self) -> list[list[Sent]]:
        """What the first rank of each rank of the pipeline sends in the passes of a step."""
        return [traffic_of(rank) for rank in self.ranks]

    @cached_property
    def time_of_passes(self) -> float:
        """The seconds that the passes of a step take, on GPUs.

        Ranks compute, and wait for what layers exchange and for each other. FSDP and a pipeline
        send meanwhile: what takes longer than to compute is waited for.
        """
        again = 1 + AGAIN[self.mode] / 3
        compute, times = self.flops * again / self.world_size / FLOPS, []
        for sent in self.passes:
            layers = sum(self.way(each) for each in sent if each.along in OF_LAYERS)
            weights = sum(self.way(each) for each in sent if each.along not in OF_LAYERS)
            times.append((compute + layers) / (1 - self.bubble) + max(0, weights - compute))
        return max(times)

    def way(self, sent: Sent) -> float:
        """Return the seconds for which something is on its way."""
        return sent.size / (NVLINK if self.machines(sent.group) == 1 else NETWORK)

    def machines(self, group: Ranks) -> int:
        """Return on how many machines the ranks of a group are."""
        return len({rank // self.per_node for rank in group})

    @cached_property
    def busiest(self) -> int:
        """The rank of the pipeline that sends most in its passes."""
        return max(range(len(self.ranks)), key=lambda n: sum(s.size for s in self.passes[n]))

    @cached_property
    def owned(self) -> tuple[dict[int, int], list[Sent]]:
        """The orthogonalisation FLOPs of ranks with the busiest one's stages, and what it sends."""
        return owners_of(self.ranks[self.busiest])

    @property
    def sent(self) -> list[Sent]:
        """What the busiest rank sends in a step."""
        return [*self.passes[self.busiest], *self.owned[1]]

    @property
    def seconds(self) -> float | None:
        """The time of a step on GPUs, at assumed speeds; None on CPUs."""
        if not self.per_node:
            return None
        loads, sent = self.owned
        optimizer = sum(map(self.way, sent)) + max(loads.values(), default=0) / FLOPS
        return self.time_of_passes + optimizer


def plan_run(config: ResolvedConfig, world_size: int, per_node: int) -> Plan:
    """Plan a run on `world_size` ranks, with `per_node` GPUs on each machine (0: CPUs).

    Raises `UserError` if the config does not divide.
    """
    costs = ModelCosts(config, per_node)
    return Plan(costs, costs.config, world_size)


def check_gpu_memory(config: ResolvedConfig, sizes: UsableSizes) -> None:
    """Raise `UserError` if GPUs are too small for what the fewest ranks of an elastic run keep.

    That is without activations: a plan tells more.
    """
    memory = gpu_memory()
    if memory is None or config.parallelism.cpu_offload:
        return
    every = plan_run(config, sizes.ranks[0], sizes.per_machine).ranks
    kept = max(rank.weights + rank.gradients + rank.optimizer_state for rank in every)
    if kept > memory:
        raise UserError(
            f"NNODES = {sizes.asked}: {sizes.ranks[0]} ranks would be too few: weights, gradients "
            f"and optimizer state of each take {kept / GIB:,.1f} GiB, and a GPU has "
            f"{memory / GIB:,.1f} GiB: raise MIN, or set parallelism.cpu_offload"
        )
