"""Matrix products of the blocks' linear layers in float8."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Float8Config:
    """Which matrix products are computed in float8, by torchao. Weights stay float32."""

    recipe: Literal["none", "tensorwise", "rowwise"] = "none"
    """Compute the linear layers of all blocks in float8, those whose two sizes are multiples of 16.
    tensorwise: one scale for each matrix, the fastest. rowwise: one for each row, closer to
    bfloat16. Needs a GPU of compute capability 8.9 (L4, H100) or later, and pays with compiled
    blocks only."""
