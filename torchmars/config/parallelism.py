"""How the ranks share the work."""

from dataclasses import dataclass
from typing import Annotated, NamedTuple

from torchmars.config.fields import Positive, require
from torchmars.core.bounds import Range


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


@dataclass(frozen=True)
class ParallelismConfig:
    """How the ranks share the work. dp_replicate * dp_shard is the number of ranks."""

    dp_replicate: Positive = 1
    """Copies of the model. With dp_shard > 1 this is HSDP."""
    dp_shard: Annotated[int, Range(-float("inf"), 1_000_000_000)] = -1
    """Ranks over which each copy is sharded (FSDP2). -1: all that remain."""

    def check(self) -> None:
        """Raise `UserError` for a dp_shard that is neither -1 nor a size."""
        require(
            self.dp_shard == -1 or self.dp_shard >= 1,
            f"parallelism.dp_shard must be -1 (the rest) or at least 1, got {self.dp_shard}",
        )

    def degrees(self, world_size: int) -> Degrees:
        """Return the sizes of all axes on `world_size` ranks.

        Raises `UserError` with the numbers if they do not fit.
        """
        shard = world_size // self.dp_replicate if self.dp_shard == -1 else self.dp_shard
        require(
            self.dp_replicate * shard == world_size,
            f"parallelism.dp_replicate = {self.dp_replicate} times "
            f"parallelism.dp_shard = {self.dp_shard} does not make {world_size} ranks: "
            "change them or the number of ranks (NGPU)",
        )
        return Degrees(dp_replicate=self.dp_replicate, dp_shard=shard)
