"""Initial weights that depend on the seed and the parameter's name only, never on the layout.

Their standard deviations are each model's: `Model.init_std`.
"""

import hashlib

import torch

from torchmars.models.model import Model
from torchmars.optim.state import fill


@torch.no_grad()
def init_weights(model: Model, seed: int) -> None:
    """Fill the parameters in place, from N(0, `model.init_std(name)`^2) or with ones for None.

    Every rank draws the whole tensor on the CPU, from a generator of the parameter's own, and keeps
    its part. The generators of devices and of sharded tensors would make the weights depend on the
    layout.
    """
    for name, parameter in model.named_parameters():
        std = model.init_std(name)
        if std is None:
            parameter.fill_(1.0)
            continue
        digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big", signed=True))
        whole = torch.empty(parameter.shape, dtype=parameter.dtype)
        fill(parameter, whole.normal_(std=std, generator=generator))
