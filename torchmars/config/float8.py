"""Matrix products of the blocks' linear layers in float8."""

from dataclasses import dataclass
from typing import Literal

from torchmars.config.fields import require


@dataclass(frozen=True)
class Float8Config:
    """Which matrix products are computed in float8, by torchao. Weights stay float32."""

    recipe: Literal["none", "tensorwise", "rowwise"] = "none"
    """Compute the linear layers of all blocks in float8, those whose two sizes are multiples of 16.
    tensorwise: one scale for each matrix, the fastest. rowwise: one for each row, closer to
    bfloat16. Needs a GPU of compute capability 8.9 (L4, H100) or later, and pays with compiled
    blocks only."""
    all_gather: bool = False
    """Gather these weights in float8 too, which FSDP's ranks else send in the compute dtype. With
    tensorwise only, where the ranks share the rows of each weight evenly. One rank gathers
    nothing."""
    emulate: bool = False
    """Round to float8, and multiply in the compute dtype: for tests, on any device."""

    def check(self) -> None:
        """Raise `UserError` for an option without its recipe."""
        require(
            not self.all_gather or self.recipe == "tensorwise",
            "training.float8.all_gather does not go with training.float8.recipe = "
            f'"{self.recipe}": choose "tensorwise", or set it to false',
        )
        require(
            not self.emulate or self.recipe != "none",
            "training.float8.emulate has no meaning without training.float8.recipe: set that too",
        )
