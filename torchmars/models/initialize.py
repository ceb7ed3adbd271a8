"""Initial weights that depend on the seed and the parameter's name only, never on the layout.

Their standard deviations are each model's: `Model.init_std`.

A parameter is covered by a grid of tiles, each with a random generator of its own. A rank draws the
tiles that its part touches, whole, and keeps what is its own.
"""

import hashlib
import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from torchmars.models.model import Model
from torchmars.optim.tensors import local_intervals, local_part

# All dims but the last are the rows of the grid. Small tiles waste little on a rank that has a few
# rows or columns of each matrix. Large tiles waste little on seeding, which takes the time of 1,400
# values. Eleven sizes were compared by measured times of one tile, for models of 8B and 70B on 64
# and 512 ranks, with and without tensor parallelism over 8. This one is within a fifth of the best
# everywhere. Another size means other initial weights.
TILE_ROWS, TILE_COLUMNS = 8, 1024


@torch.no_grad()
def init_weights(
    model: Model,
    seed: int,
    weights: Mapping[str, Tensor] | None = None,
    factors: Mapping[str, float] | None = None,
) -> None:
    """Fill the parameters in place, from N(0, `model.init_std(name)`^2) or with ones for None.

    Buffers, such as the biases of routers, begin as 0. `weights`, by name, are filled in the place
    of the parameters. `factors`, by name, are those of standard deviations, where they are not 1.

    Each rank draws its own part on the CPU, in float32. It needs memory for one row of tiles.
    """
    for buffer in model.buffers():
        buffer.zero_()
    for name, parameter in (weights or dict(model.named_parameters())).items():
        std = model.init_std(name)
        if std is None:
            parameter.fill_(1.0)
        elif local_part(parameter).numel():
            _draw(parameter, std * (factors or {}).get(name, 1.0), f"{seed}/{name}")


def _draw(parameter: Tensor, std: float, key: str) -> None:
    """Fill this rank's part of a parameter, which is not empty."""
    *leading, columns = (slice(*interval) for interval in local_intervals(parameter))
    numbers = np.arange(math.prod(parameter.shape[:-1])).reshape(parameter.shape[:-1])
    rows = numbers[tuple(leading)].ravel()
    target = local_part(parameter).view(len(rows), -1)

    done = 0
    while done < len(rows):
        band = rows[done] // TILE_ROWS
        end = int(np.searchsorted(rows, (band + 1) * TILE_ROWS))
        drawn = _tile_row(parameter, key, band, columns)[rows[done:end] - band * TILE_ROWS]
        target[done:end] = torch.from_numpy(drawn * np.float32(std))
        done = end


def _tile_row(parameter: Tensor, key: str, band: int, columns: slice) -> np.ndarray:
    """Return the given columns of row `band` of the tiles, from N(0, 1)."""
    height = min(TILE_ROWS, math.prod(parameter.shape[:-1]) - band * TILE_ROWS)
    first = columns.start // TILE_COLUMNS
    tiles = []
    for tile in range(first, -(-columns.stop // TILE_COLUMNS)):
        width = min(TILE_COLUMNS, parameter.shape[-1] - tile * TILE_COLUMNS)
        # Not torch's generator: on the CPU it uses 32 bits of its seed. A model of 8B parameters
        # has a million tiles, and about 100 pairs of them would be equal.
        digest = hashlib.sha256(f"{key}/{band}/{tile}".encode()).digest()
        generator = np.random.Generator(np.random.PCG64(int.from_bytes(digest, "big")))
        tiles.append(generator.standard_normal((height, width), dtype=np.float32))
    offset = first * TILE_COLUMNS
    return np.hstack(tiles)[:, columns.start - offset : columns.stop - offset]
