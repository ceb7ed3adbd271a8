"""The MARS optimizers and what belongs to them.

This package needs torch only, and is usable without the rest of torchmars.
"""

from torchmars.optim.mars import MARS
from torchmars.optim.param_groups import param_groups
from torchmars.optim.schedules import between, lr_factor

__all__ = ["MARS", "between", "lr_factor", "param_groups"]
