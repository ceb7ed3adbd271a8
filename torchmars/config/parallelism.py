"""How the ranks share the work."""

from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

from torchmars.config.fields import Positive, require
from torchmars.core.check import Interval
from torchmars.core.words import counted

PipelineSchedule = Literal["GPipe", "1F1B", "Interleaved1F1B"]
Accumulation = Literal["sharded", "reduced", "whole"]
Resharding = Positive | Literal["auto", "always", "never"]


class Degrees(NamedTuple):
    """The sizes of the mesh's axes, and of `ep`, a second view over the inner ones."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1

    @property
    def data(self) -> int:
        """How many ranks read different samples."""
        return self.dp_replicate * self.dp_shard

    def changes(self, now: "Degrees") -> list[str]:
        """Return a line for each degree that is another one `now`."""
        pairs = zip(self._fields, self, now)
        return [f"parallelism.{axis} {old} -> {new}" for axis, old, new in pairs if old != new]


@dataclass(frozen=True)
class ParallelismConfig:
    """How the ranks share the work. dp_replicate * dp_shard * cp * tp * pp is their number; ep is
    a second view of some of them."""

    dp_replicate: Positive = 1
    """Copies of the model. With dp_shard > 1 this is HSDP."""
    dp_shard: Annotated[int, Interval(le=1_000_000_000)] = -1
    """Ranks over which each copy is sharded (FSDP2). -1: all that remain."""
    tp: Positive = 1
    """Ranks over which each layer is cut (tensor parallelism). The activations between layers are
    cut along the sequence, the token table, the head and the loss along the vocabulary. Keep them
    on one machine."""
    cp: Positive = 1
    """Ranks over which each sequence is cut (context parallelism)."""
    ep: Positive = 1
    """Ranks over which the experts of each block are dealt out (expert parallelism). Tokens travel
    to the ranks of their experts and back. They are neighbours among the dp_shard * cp * tp ranks,
    which ep divides. Keep them on one machine."""
    cp_method: Literal["all-gather", "ulysses"] = "all-gather"
    """How attention sees the whole sequence. all-gather: each rank gathers the keys and values.
    ulysses: the ranks exchange sequence parts for heads; cp must divide the heads."""
    pp: Positive = 1
    """Ranks over which the blocks are dealt out (pipeline parallelism)."""
    pp_schedule: PipelineSchedule = "1F1B"
    """The order in which a pipeline works on microbatches, by torch's names. GPipe and 1F1B have
    one stage on each rank, Interleaved1F1B two."""

    reshard_after_forward: Resharding = "auto"
    """Whether a block frees the weights that it gathered after the forward pass, and gathers them
    again for the backward pass. auto: yes, but not in a pipeline, where each microbatch would
    gather them, nor where each rank has whole weights, which it would only copy, and not on CPUs
    with a model of at most 32 MiB in the compute dtype, which is then gathered as a whole. always:
    also the weights outside of blocks. never. A number: yes, but groups of so many ranks keep them
    together, and gather them among themselves."""
    accumulate: Accumulation = "sharded"
    """How ranks keep a gradient from one microbatch to the next. sharded: each rank its shard;
    copies of the model exchange theirs at the last microbatch. reduced: each rank its shard, which
    copies exchange every time. whole: each rank the whole gradient of the weights that it computes
    with: most memory, least traffic."""
    cpu_offload: bool = False
    """Keep weights, gradients and optimizer state in the memory of the CPU, where the optimizer
    then computes. The GPU has the weights of a block only while it computes with them."""

    def check(self) -> None:
        """Raise `UserError` for a dp_shard that is neither -1 nor a size, and for groups that
        do not go with other axes."""
        require(
            self.dp_shard == -1 or self.dp_shard >= 1,
            f"parallelism.dp_shard must be -1 (the rest) or at least 1, got {self.dp_shard}",
        )
        # FSDP2 makes groups of one mesh's ranks, and waits for all of the run (torch 2.11 to 2.15).
        others = [f"parallelism.{axis}" for axis in ("tp", "pp", "ep") if vars(self)[axis] > 1]
        require(
            not isinstance(self.reshard_after_forward, int) or not others,
            f"parallelism.reshard_after_forward = {self.reshard_after_forward!r} does not go with "
            f'{" and ".join(others)}: FSDP2 makes such groups of all ranks alone. Choose "auto"',
        )

    def blocks_reshard(self, shards: int) -> bool | int:
        """Return `reshard_after_forward` of blocks, as FSDP2 takes it.

        Their weights are cut into `shards` shards.
        """
        if isinstance(self.reshard_after_forward, int):
            return self.reshard_after_forward
        auto = self.pp == 1 and (shards > 1 or self.cpu_offload)
        return {"auto": auto, "always": True, "never": False}[self.reshard_after_forward]

    @property
    def stages(self) -> int:
        """Stages of the whole pipeline."""
        return self.pp * (2 if self.pp > 1 and self.pp_schedule == "Interleaved1F1B" else 1)

    def degrees(self, world_size: int) -> Degrees:
        """Return the sizes of all axes on `world_size` ranks.

        Raises `UserError` with the numbers if they do not fit.
        """
        others = {"dp_replicate": self.dp_replicate, "cp": self.cp, "tp": self.tp, "pp": self.pp}
        product = self.dp_replicate * self.cp * self.tp * self.pp
        shard = world_size // product if self.dp_shard == -1 else self.dp_shard
        given = {name: size for name, size in others.items() if size > 1}
        given |= {} if self.dp_shard == -1 else {"dp_shard": shard}
        named = " times ".join(f"parallelism.{name} = {size}" for name, size in given.items())
        fails = "divide" if self.dp_shard == -1 else "make"
        require(
            product * shard == world_size,
            f"{named} does not {fails} {counted(world_size, 'rank')}: change them or the number of "
            "ranks (NGPU)",
        )
        inner = shard * self.cp * self.tp
        require(
            inner % self.ep == 0,
            f"parallelism.ep = {self.ep} does not divide the {counted(inner, 'rank')} of "
            f"parallelism.dp_shard * cp * tp: choose a divisor of {inner}",
        )
        return Degrees(self.pp, self.dp_replicate, shard, self.cp, self.tp, self.ep)
