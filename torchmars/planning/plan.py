"""The memory, traffic and time of a run, before it has a cluster."""

from dataclasses import dataclass
from functools import cached_property

import torch

from torchmars.config import ResolvedConfig
from torchmars.config.dtypes import resolve_dtypes
from torchmars.core.device import PLANNED
from torchmars.core.errors import UserError
from torchmars.data.mixture import Mixture
from torchmars.data.shares import shares_from_start
from torchmars.data.tokenizer import load_tokenizer
from torchmars.models import Model, build_run_model
from torchmars.optim import MARS
from torchmars.optim.matrices.agreement import multiplies_bfloat16
from torchmars.optim.matrices.exchange import OwnerLoads
from torchmars.parallel.checks import check_layout
from torchmars.parallel.cuts import blocks_of_stages, head_in_blocks
from torchmars.parallel.groups import AXES
from torchmars.parallel.layout import Layout
from torchmars.planning.assumptions import FLOPS, NETWORK, NVLINK
from torchmars.planning.pipeline import actions_of_ranks, bubble, computed_again
from torchmars.planning.simulation import Simulation, simulate_ranks
from torchmars.planning.thumb import RuleOfThumb
from torchmars.training.optimizer import build_optimizer
from torchmars.training.preparation import prepared_data


def plan_rank(config: ResolvedConfig, world_size: int, per_node: int, rank: int = 0) -> "Plan":
    """Plan rank number `rank` of `world_size`, with `per_node` GPUs on each machine (0: CPUs).

    It makes a process group, which must be left before the next plan. Raises `UserError` if the
    config does not divide.
    """
    if per_node and world_size > per_node and world_size % per_node:
        raise UserError(
            f"--world-size {world_size} does not fill machines of --gpus-per-node {per_node}: "
            f"choose a multiple of {per_node}"
        )
    device = torch.device(PLANNED if per_node else "cpu")
    layout = Layout.simulate(config.parallelism, world_size, rank, device)
    native_bfloat16 = per_node > 0 or multiplies_bfloat16(
        device
    )  # CPUs are taken to be like this one
    config = resolve_dtypes(config, device, native_bfloat16)
    data = prepared_data(config)
    vocab_size = data.vocab_size if data else load_tokenizer(config.data.tokenizer).vocab_size
    whole = build_run_model(config, vocab_size)
    check_layout(config, config.parallelism.degrees(world_size), whole)
    optimizer = build_optimizer(config, whole)
    ranks = simulate_ranks(config, layout, whole)
    return Plan(config, layout, whole, optimizer, ranks, data, per_node)


@dataclass
class Plan:
    """The figures of a run, for one rank: rank 0 has the largest shards."""

    config: ResolvedConfig
    layout: Layout
    whole: Model
    """The model, without memory."""
    optimizer: MARS
    """The optimizer of the whole model, without memory."""
    ranks: list[Simulation]
    """A step of each rank of a pipeline, or of the only one, at the place of `layout`."""
    data: Mixture | None
    """None if the data is not prepared yet."""
    per_node: int
    """GPUs on each machine; 0: CPUs."""

    @property
    def simulation(self) -> Simulation:
        """A step of the planned rank."""
        return self.ranks[self.layout.group("pp").rank]

    @cached_property
    def checkpoint(self) -> int:
        """Bytes of a checkpoint, of all ranks together. Each has its own generators."""
        state = sum(rank.checkpoint for rank in self.ranks)
        shared = (len(self.ranks) - 1) * self.simulation.optimizer.skipped.nbytes
        return state - shared + self.simulation.generators * self.layout.world.size

    @property
    def microbatches(self) -> tuple[int, int]:
        """Sequences of a microbatch, and microbatches of a step."""
        return self.config.training.microbatches(
            self.layout.data.size, self.config.parallelism.stages
        )

    @property
    def tokens_per_parameter(self) -> float:
        """Tokens of the whole run for each parameter that a token uses."""
        return self.config.training.tokens / self.whole.active_count

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

    @cached_property
    def rule(self) -> RuleOfThumb:
        """The figures of a rule of thumb for the model, without an optimizer's state."""
        return RuleOfThumb(self.whole, 0, self.layout.world.size, self.per_node)

    @cached_property
    def seconds(self) -> float | None:
        """The time of a step on GPUs, at assumed speeds; None on CPUs.

        Ranks compute, and wait for what layers exchange and for each other. FSDP and a pipeline
        send meanwhile: what takes longer than to compute is waited for, and so is the optimizer.
        """
        if not self.per_node:
            return None
        flops = self.flops_per_token * self.config.training.tokens_per_step
        again = 1 + computed_again(self.config.activation_checkpoint) / 3
        compute = flops * again / self.layout.world.size / FLOPS
        steps = []
        for rank in self.ranks:
            layers = weights = optimizer = 0.0
            for kind, size in rank.traffic.sent.items():
                inside = len({number // self.per_node for number in kind.ranks}) == 1
                speed, waited = NVLINK if inside else NETWORK, rank.traffic.waited[kind]
                if kind.phase == "optimizer":
                    optimizer += size / speed
                else:
                    layers += waited / speed
                    weights += (size - waited) / speed
            passes = (compute + layers) / (1 - (self.bubble or 0))
            steps.append(passes + max(0, weights - compute) + optimizer)
        return max(steps) + self.largest_load / FLOPS

    @property
    def flops_per_token(self) -> int:
        """FLOPs of the forward and backward passes of one token, with exact mode's look-ahead."""
        return self.config.optimizer.passes * self.whole.flops_per_token()

    @cached_property
    def largest(self) -> Simulation:
        """The rank of the pipeline with the largest peak."""
        return max(self.ranks, key=lambda rank: rank.peak)

    @cached_property
    def bubble(self) -> float | None:
        """The part of a step that the ranks of a pipeline wait for each other; None without one."""
        pipeline = self.simulation.model.pipeline
        if pipeline is None:
            return None
        stages = blocks_of_stages(self.whole, self.config.parallelism)
        costs = [float(len(blocks)) for blocks in stages]
        costs[-1] += head_in_blocks(self.whole)
        again = computed_again(self.config.activation_checkpoint)
        return bubble(actions_of_ranks(pipeline.schedule), costs, again)

    @property
    def owner_loads(self) -> OwnerLoads:
        """The orthogonalisation FLOPs of each rank, for each set of ranks that share the work."""
        return self.simulation.optimizer.plans.owner_loads

    @property
    def largest_load(self) -> int:
        """The largest orthogonalisation work of a rank, in FLOPs."""
        return sum(max(loads.values()) for loads in self.owner_loads.values())

    @property
    def imbalance(self) -> float:
        """The largest over the mean orthogonalisation work of a rank."""
        sets = self.owner_loads.values()
        return self.largest_load / sum(sum(loads.values()) / len(loads) for loads in sets)

    @property
    def owner_share(self) -> float:
        """The largest orthogonalisation work of a rank over its forward and backward passes'."""
        flops = self.flops_per_token * self.config.training.tokens_per_step
        return self.largest_load * self.layout.world.size / flops

    def axes_of(self, ranks: tuple[int, ...]) -> str:
        """Return the names of the axes of the mesh along which `ranks` differ."""
        shape = [self.layout.group(axis).size for axis in AXES]
        places = torch.stack(torch.unravel_index(torch.tensor(ranks), shape))
        differ = (places != places[:, :1]).any(dim=1).tolist()
        return ", ".join(axis for axis, varies in zip(AXES, differ) if varies) or "none"
