"""The memory, traffic and time of a run, before it has a cluster: all by formula."""

from collections.abc import Sequence
from functools import cached_property

import torch

from torchmars.cluster.sizes import UsableSizes
from torchmars.config import ResolvedConfig
from torchmars.config.ranks import resolve_compile, resolve_dtypes
from torchmars.core.device import GPU_TYPE, gpu_memory
from torchmars.core.errors import UserError
from torchmars.core.words import counted
from torchmars.data.mixture import Mixture
from torchmars.data.order import shares_from_start
from torchmars.data.tokenizer import load_tokenizer
from torchmars.models import build_run_model
from torchmars.optim.matrices.agreement import multiplies_bfloat16
from torchmars.optim.matrices.exchange import OwnerLoads
from torchmars.parallel.checks import check_layout
from torchmars.planning.memory import LayoutMemory, ModelCosts, RankMemory
from torchmars.planning.traffic import Sent, groups_of, owners_of, traffic_of
from torchmars.records.gpus import GIB
from torchmars.training.optimizer import build_optimizer
from torchmars.training.preparation import prepared_data

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
GENERATOR = 16  # bytes of a GPU's random number generator
# What activation checkpointing adds to a backward pass, in forward passes. "selective" keeps the
# dear results.
AGAIN = {"none": 0.0, "selective": 0.2, "full": 1.0}


class Plan:
    """The figures of a model's run on one layout: `plan_run` makes it."""

    def __init__(
        self,
        costs: ModelCosts,
        config: ResolvedConfig,
        world_size: int,
        per_node: int,
        data: Mixture | None = None,
    ) -> None:
        """Machines have `per_node` GPUs; 0: CPUs. Without `data` it is not prepared yet.

        `config` has resolved dtypes. Raises `UserError` if it does not divide.
        """
        device = GPU_TYPE if per_node else "cpu"
        self.costs, self.whole, self.optimizer = costs, costs.model, costs.optimizer
        self.data = data
        self.world_size, self.per_node = world_size, per_node
        self.degrees = config.parallelism.degrees(world_size)
        check_layout(config, self.degrees, self.whole)
        self.config = resolve_compile(config, torch.device(device), True, self.degrees.tp, None)
        self.memory = LayoutMemory(costs, self.config, self.degrees, device)
        self.ranks = self.memory.ranks
        """The memory of each rank of a pipeline, or of the only one."""
        self.microbatches = self.memory.size, self.memory.microbatches
        """Sequences of a microbatch, and microbatches of a step."""

    @property
    def largest(self) -> RankMemory:
        """The rank of the pipeline with the largest peak."""
        return max(self.ranks, key=lambda rank: rank.peak)

    @property
    def checkpoint(self) -> int:
        """Bytes of a checkpoint, of all ranks together. Each has its own generators."""
        weights = 4 * self.whole.parameter_count * (2 if self.config.training.ema_decay else 1)
        states = self.optimizer.state.values()
        state = sum(tensor.nbytes for each in states for tensor in each.values())
        buffers = sum(buffer.nbytes for buffer in self.whole.buffers())
        counts = 8 * self.whole.experts * len(self.whole.routed()) * self.config.optimizer.passes
        generators = torch.get_rng_state().nbytes + (GENERATOR if self.per_node else 0)
        skipped = self.optimizer.skipped.nbytes
        return weights + state + buffers + counts + skipped + generators * self.world_size

    @property
    def epochs(self) -> dict[str, float]:
        """How often the run reads each corpus, by its folder; none if one is not prepared yet."""
        if self.data is None:
            return {}
        training = self.config.training
        samples = shares_from_start(self.data.weights).counts(
            training.steps * training.global_batch_size
        )
        return {
            str(part.folder): count * training.seq_len / part.manifest.splits["train"].tokens
            for part, count in zip(self.data.parts, samples)
        }

    @property
    def flops(self) -> int:
        """FLOPs of the forward and backward passes of a step, with exact mode's look-ahead."""
        training, passes = self.config.training, self.config.optimizer.passes
        return passes * self.costs.flops * training.tokens_per_step

    @cached_property
    def bubble(self) -> float:
        """The part of a step that the ranks of a pipeline wait for each other, their mean.

        (p - 1) / (n + p - 1) if all stages cost the same: Narayanan et al. 2021, arXiv 2104.04473,
        section 2.2. More if a rank has more to do.
        """
        pp, rounds = self.degrees.pp, self.memory.microbatches * len(self.memory.own[0])
        loads = [float(sum(map(len, rank.stages.values()))) for rank in self.ranks]
        loads[-1] += self.costs.head_in_blocks  # the last stage is the last rank's
        return 1 - sum(loads) / pp / max(loads) * rounds / (rounds + pp - 1)

    @cached_property
    def passes(self) -> list[list[Sent]]:
        """What the first rank of each rank of the pipeline sends in the passes of a step."""
        return [traffic_of(self.memory, rank) for rank in range(self.degrees.pp)]

    @cached_property
    def time_of_passes(self) -> float:
        """The seconds that the passes of a step take, on GPUs.

        Ranks compute, and wait for what layers exchange and for each other. FSDP and a pipeline
        send meanwhile: what takes longer than to compute is waited for.
        """
        again = 1 + AGAIN[self.config.activation_checkpoint.mode] / 3
        compute, times = self.flops * again / self.world_size / FLOPS, []
        for sent in self.passes:
            layers = sum(self.way(each) for each in sent if each.waited)
            weights = sum(self.way(each) for each in sent if not each.waited)
            times.append((compute + layers) / (1 - self.bubble) + max(0, weights - compute))
        return max(times)

    def way(self, sent: Sent) -> float:
        """Return the seconds for which something is on its way."""
        return sent.size / (NVLINK if self.machines(sent.group) == 1 else NETWORK)

    def machines(self, group: Sequence[int]) -> int:
        """Return on how many machines the ranks of a group are."""
        return len({rank // self.per_node for rank in group})

    @cached_property
    def busiest(self) -> int:
        """The rank of the pipeline that sends most in its passes."""
        return max(range(len(self.ranks)), key=lambda n: sum(each.size for each in self.passes[n]))

    @cached_property
    def owned(self) -> tuple[OwnerLoads, list[Sent]]:
        """The orthogonalisation FLOPs of ranks that share work, and what the busiest rank sends."""
        wide = 2 if self.config.optimizer.matrix_dtype == "bfloat16" else 4
        parts = [self.memory.parts[each] for each in self.memory.own[self.busiest]]
        weights = {name: each for part in parts for name, each in part.weights.items()}
        first = groups_of(self.degrees, self.busiest)["stage"][0]
        return owners_of(self.optimizer, weights, self.degrees, first, wide)

    @property
    def sent(self) -> list[Sent]:
        """What the busiest rank sends in a step."""
        return [*self.passes[self.busiest], *self.owned[1]]

    @property
    def largest_load(self) -> int:
        """The largest orthogonalisation work of a rank, in FLOPs."""
        return sum(max(loads.values()) for loads in self.owned[0].values())

    @property
    def seconds(self) -> float | None:
        """The time of a step on GPUs, at assumed speeds; None on CPUs."""
        if not self.per_node:
            return None
        optimizer = sum(map(self.way, self.owned[1])) + self.largest_load / FLOPS
        return self.time_of_passes + optimizer


def costs_of(
    config: ResolvedConfig, per_node: int
) -> tuple[ModelCosts, ResolvedConfig, Mixture | None]:
    """Return the costs of a config's model, the config with resolved dtypes, and prepared data.

    Raises `UserError` for mistakes in them.
    """
    device = torch.device(GPU_TYPE if per_node else "cpu")
    # CPUs are taken to be like this one.
    config = resolve_dtypes(config, device, per_node > 0 or multiplies_bfloat16(device))
    data = prepared_data(config)
    vocab_size = data.vocab_size if data else load_tokenizer(config.data.tokenizer).vocab_size
    model = build_run_model(config, vocab_size)
    itemsize = getattr(torch, config.training.dtype).itemsize
    return ModelCosts(model, build_optimizer(config, model), itemsize), config, data


def plan_run(config: ResolvedConfig, world_size: int, per_node: int) -> Plan:
    """Plan a run on `world_size` ranks, with `per_node` GPUs on each machine (0: CPUs).

    Raises `UserError` if the config does not divide.
    """
    check_machines(world_size, per_node)
    costs, config, data = costs_of(config, per_node)
    return Plan(costs, config, world_size, per_node, data)


def check_machines(world_size: int, per_node: int) -> None:
    """Raise `UserError` unless ranks fill machines of `per_node` GPUs."""
    if per_node and world_size > per_node and world_size % per_node:
        raise UserError(
            f"--world-size {world_size} does not fill machines of --gpus-per-node {per_node}: "
            f"choose a multiple of {per_node}"
        )


def check_gpu_memory(config: ResolvedConfig, sizes: UsableSizes) -> None:
    """Raise `UserError` if GPUs are too small for what the fewest ranks of an elastic run keep.

    That is without activations: a plan tells more.
    """
    memory = gpu_memory()
    if memory is None or config.parallelism.cpu_offload:
        return
    fewest, ranks = sizes.usable[0], sizes.ranks[0]
    costs, config, _ = costs_of(config, sizes.per_machine)
    every = Plan(costs, config, ranks, sizes.per_machine).ranks
    kept = max(rank.weights + rank.gradients + rank.optimizer_state for rank in every)
    if kept <= memory:
        return
    enough = [each for each in sizes.usable if kept * fewest / each <= memory]
    remedy = f"to {enough[0]} at least" if enough else "and MAX, or set parallelism.cpu_offload"
    raise UserError(
        f"NNODES = {sizes.asked}: {counted(fewest, 'machine')} with {counted(ranks, 'rank')} "
        f"would be too few: weights, gradients and optimizer state of a rank take "
        f"{kept / GIB:,.1f} GiB, and a GPU has {memory / GIB:,.1f} GiB: raise MIN {remedy}"
    )
