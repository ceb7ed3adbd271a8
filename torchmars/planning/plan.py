"""What a run will take of each rank: memory, traffic, work; and what an expert would warn of."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from torchmars.config import ResolvedConfig
from torchmars.config.dtypes import resolve_dtypes
from torchmars.core.console import labelled
from torchmars.core.errors import UserError
from torchmars.core.tables import table
from torchmars.data.shards import Manifest, read_manifest
from torchmars.data.tokenizer import TOKENIZERS
from torchmars.optim.exchange import OwnerLoads
from torchmars.optim.precision import multiplies_bfloat16
from torchmars.parallel.layout import Layout
from torchmars.planning.simulation import Simulation, simulate_step
from torchmars.training.summary import summary

GIB = 2**30
# An H100 in a cluster: 80 GiB less what CUDA, NCCL and a fragmented allocator take, the model FLOP/s that it reaches, 400 Gb/s of network.
MEMORY, SPEED, NETWORK = 72 * GIB, 400e12, 50e9
OPTIMIZER_SHARE = 0.1  # of a step, from which on an uneven plan is felt
REPEATS = 4  # epochs after which data that is read again is worth less than new data: Muennighoff et al., arXiv 2305.16264
TOKENS_PER_PARAMETER = 20  # about compute-optimal: Hoffmann et al., arXiv 2203.15556


def make_plan(config: ResolvedConfig, world_size: int, per_node: int, rank: int = 0) -> "Plan":
    """The plan of rank number `rank` of `world_size`, with `per_node` GPUs on each machine (0: CPUs). Once in a process.

    Raises `UserError` where the config does not divide.
    """
    if per_node and world_size > per_node and world_size % per_node:
        raise UserError(
            f"--world-size {world_size} does not fill machines of --gpus-per-node {per_node}: choose a multiple of {per_node}"
        )
    layout = Layout.simulate(
        config.parallelism, world_size, rank, torch.device("cuda" if per_node else "cpu")
    )
    fast = per_node > 0 or multiplies_bfloat16(layout.device)  # CPUs are taken to be like this one
    config = resolve_dtypes(config, layout.device, fast)
    folder = Path(config.data.path)
    data = read_manifest(folder) if (folder / "manifest.json").exists() else None
    vocab_size = data.vocab_size if data else TOKENIZERS[config.data.tokenizer].vocab_size
    return Plan(config, layout, simulate_step(config, layout, vocab_size), data, per_node)


@dataclass
class Plan:
    """What a run takes of each rank. Rank 0, which a plan is made for, has the largest shards."""

    config: ResolvedConfig
    layout: Layout
    simulation: Simulation
    data: Manifest | None
    per_node: int

    @cached_property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.simulation.model.parameters())

    @property
    def tokens_per_step(self) -> int:
        return self.config.training.global_batch_size * self.config.training.seq_len

    @property
    def tokens(self) -> int:
        """Of the whole run."""
        return self.tokens_per_step * self.config.training.steps

    @property
    def epochs(self) -> float | None:
        """How often the run reads its data; None where that is not prepared yet."""
        return self.tokens / self.data.splits["train"].tokens if self.data else None

    @property
    def flops_per_token(self) -> int:
        """Of the model, forward and backward, in exact mode twice."""
        return self.simulation.model.flops_per_token() * (
            2 if self.simulation.optimizer.exact else 1
        )

    @property
    def owner_loads(self) -> OwnerLoads:
        """The Newton–Schulz work of each rank, in FLOPs, for each set of ranks that share work."""
        return self.simulation.optimizer.plans.owner_loads

    @property
    def largest_load(self) -> int:
        """The largest Newton–Schulz work of a rank, in FLOPs."""
        return sum(max(loads.values()) for loads in self.owner_loads.values())

    @property
    def balance(self) -> float:
        """The largest over the mean Newton–Schulz work of a rank."""
        sets = self.owner_loads.values()
        return self.largest_load / sum(sum(loads.values()) / len(loads) for loads in sets)

    @property
    def owner_share(self) -> float:
        """The largest Newton–Schulz work of a rank, relative to that of its forward and backward passes in a step."""
        return self.largest_load / (
            self.flops_per_token * self.tokens_per_step / self.layout.world.size
        )

    def lines(self) -> list[str]:
        """The plan, for the console."""
        simulation = self.simulation
        sections = {
            "memory": self._memory(),
            "disk": self._disk(),
            "wire": self._wire(),
            "owners": self._owners(),
            "tokens": self._tokens(),
        }
        lines = summary(self.config, self.layout, simulation.model, simulation.optimizer)
        for name, told in sections.items():
            lines += labelled(name, *told)
        return lines + [line for text in self.warnings() for line in labelled("warning", text)]

    def _memory(self) -> list[str]:
        rows = [
            ("weights", self.simulation.weights),
            ("gradients", self.simulation.gradients),
            ("optimizer state", self.simulation.optimizer_state),
            ("gathered weights and gradients, at the peak", self.simulation.gathered),
            ("activations, at the peak (estimated)", self.simulation.activations),
            ("peak", self.simulation.peak),
        ]
        return table(
            [
                ("of each rank", "GiB", "bytes"),
                *((name, f"{size / GIB:.3f}", f"{size:,}") for name, size in rows),
            ]
        )

    def _disk(self) -> list[str]:
        size, settings = self.simulation.checkpoint, self.config.checkpoint
        lines = [
            f"{size / GIB:,.2f} GiB ({size:,} bytes) a checkpoint"
            + (
                f", {settings.keep_last * size / GIB:,.1f} GiB for the {settings.keep_last} that are kept"
                if settings.keep_last
                else ", and all are kept"
            )
        ]
        if settings.async_save:
            ranks = min(self.per_node or self.layout.world.size, self.layout.world.size)
            copy = (self.simulation.weights + self.simulation.optimizer_state) * ranks
            lines.append(
                f"{copy / GIB:,.2f} GiB of each machine's memory for the copy that is written"
            )
        return lines

    def _wire(self) -> list[str]:
        simulation = self.simulation
        rows = [("sent by each rank in a step", "among", "times", "MiB")]
        for kind, sent in simulation.sent.items():
            among = f"{len(kind.ranks)} ranks" + (
                f" on {self._machines(kind.ranks)}" if self.per_node else ""
            )
            rows.append(
                (
                    f"{kind.phase}, {kind.operation}",
                    among,
                    f"{simulation.times[kind]}",
                    f"{sent / 2**20:,.2f}",
                )
            )
        return table(
            [
                *rows,
                (
                    "in all",
                    "",
                    f"{sum(simulation.times.values())}",
                    f"{sum(simulation.sent.values()) / 2**20:,.2f}",
                ),
            ]
        )

    def _machines(self, ranks: tuple[int, ...]) -> str:
        count = len({rank // self.per_node for rank in ranks})
        return "1 machine" if count == 1 else f"{count} machines"

    def _owners(self) -> list[str]:
        loads = self.owner_loads
        if not loads:
            return ["none: no rule of this run orthogonalises matrices"]
        ranks = {rank for each in loads.values() for rank in each}
        busy = {rank for each in loads.values() for rank, load in each.items() if load}
        return [
            f"largest over mean Newton–Schulz work of a rank: {self.balance:.2f}; "
            f"{len(ranks - busy)} of {len(ranks)} ranks own no matrix",
            f"the largest is {self.owner_share:.1%} of a rank's forward and backward FLOPs",
        ]

    def _tokens(self) -> list[str]:
        read = (
            f"{self.config.data.path} is not prepared yet"
            if self.epochs is None
            else f"{self.epochs:.2f} epochs of {self.config.data.path}"
        )
        return [
            f"{self.tokens_per_step:,} a step, {self.tokens:,} to the end: {self.tokens / self.parameters:.1f} for each parameter; {read}",
            f"{self.flops_per_token * self.tokens:.2e} FLOPs",
        ]

    def warnings(self) -> Iterator[str]:
        """What an expert would say of this plan."""
        yield from self._memory_warnings()
        yield from self._network_warnings()
        training, schedule = self.config.training, self.config.schedule
        if self.owner_loads and self.balance > 1.5 and self.owner_share > OPTIMIZER_SHARE:
            yield (
                f"ranks wait for the owner of the largest matrices: split what is fused (optimizer.groups, split = 3 for QKV), or raise "
                f"training.global_batch_size = {training.global_batch_size}, so that the step's share falls"
            )
        if self.epochs is not None and self.epochs > REPEATS:
            yield f"the data is read {self.epochs:.1f} times: beyond about {REPEATS}, more data helps more than more epochs"
        if self.tokens < TOKENS_PER_PARAMETER / 2 * self.parameters:
            yield (
                f"training.steps = {training.steps} read {self.tokens / self.parameters:.1f} tokens for each parameter: a smaller model, or more steps, "
                f"use the same FLOPs better (about {TOKENS_PER_PARAMETER} are compute-optimal)"
            )
        if schedule.warmup_steps == 0 and training.steps >= 1000:
            yield "schedule.warmup_steps = 0: the published runs warm up over 2,000 steps"
        rows = self.simulation.model.args.vocab_size
        if self.per_node and (rows % 64 or self.simulation.model.args.n_embd % 64):
            yield (
                f"vocabulary {rows} or width {self.simulation.model.args.n_embd} is no multiple of 64: matrix units of GPUs are used badly "
                "(model.vocab_size, model.n_embd)"
            )

    def _memory_warnings(self) -> Iterator[str]:
        training, simulation = self.config.training, self.simulation
        microbatch_size, accumulation_steps = training.microbatches(self.layout.data.size)
        if self.per_node and simulation.peak > MEMORY:
            remedy = (
                f"lower training.microbatch_size = {microbatch_size}"
                if microbatch_size > 1
                else "lower training.seq_len, or take a smaller model"
            )
            if accumulation_steps > 1 and 4 * self.parameters > MEMORY / 2:
                remedy = "use more ranks, so that a step is one microbatch"
            yield f"the peak of {simulation.peak / GIB:.1f} GiB does not fit a GPU of 80 GiB, which leaves about {MEMORY / GIB:.0f}: {remedy}"
        if accumulation_steps > 1 and self.layout.world.size > 1:
            yield (
                f"{accumulation_steps} microbatches a step keep the whole model's gradient on each rank, {4 * self.parameters / GIB:.2f} GiB, until the last of "
                "them: raise training.microbatch_size, or use more ranks"
            )
        shards = self.layout.group("dp_shard").size
        excess = simulation.weights * shards / (4 * self.parameters)
        if excess > 1.1:
            yield (
                f"matrices do not divide over dp_shard = {shards}: rank 0 holds {excess:.2f} times its share; a dp_shard that divides the "
                f"width {simulation.model.args.n_embd} evens it out"
            )

    def _network_warnings(self) -> Iterator[str]:
        """Of FSDP over a network: each microbatch gathers all weights, 2 bytes each, and makes 2 FLOPs a token with each of them."""
        if not self.per_node or self.layout.world.size <= self.per_node:
            return
        nodes = self.layout.world.size // self.per_node
        shards = self.layout.group("dp_shard").size
        microbatch_size, _ = self.config.training.microbatches(self.layout.data.size)
        length, needed = (
            microbatch_size * self.config.training.seq_len,
            SPEED / (NETWORK * self.per_node),
        )  # a machine's ranks receive for each other
        if shards > self.per_node and shards % self.per_node:
            yield f"dp_shard = {shards} is no multiple of the {self.per_node} GPUs of a machine: shards straddle machines"
        if shards <= self.per_node or length >= needed:
            return
        state = (
            self.simulation.weights + self.simulation.gradients + self.simulation.optimizer_state
        )
        fits = (
            state * shards / self.per_node + self.simulation.activations + self.simulation.gathered
            < MEMORY
        )
        remedy = (
            f"parallelism.dp_replicate = {nodes} gathers inside machines and fits; or raise"
            if fits
            else "raise"
        )
        yield (
            f"{length:,} tokens of a microbatch on each gathering of the weights over {nodes} machines: below about {needed:,.0f} a network of 400 Gb/s for each "
            f"GPU is slower than an H100: {remedy} training.microbatch_size = {microbatch_size}"
        )
