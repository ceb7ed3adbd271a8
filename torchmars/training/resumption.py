"""Whether a run can resume from a checkpoint of its own, or start from another one's weights.

It is apart from preparation.py because its imports take a second, which a new run need not wait
for.
"""

from typing import Literal

from torchmars.checkpoint.folder import checkpoints
from torchmars.checkpoint.resume import check_same_run, newest_good, read_verified
from torchmars.config import ResolvedConfig
from torchmars.core.places import place
from torchmars.data.mixture import Mixture
from torchmars.exchange.initial import open_source, weights_of
from torchmars.models import Model
from torchmars.training.optimizer import build_optimizer


def check_resume(config: ResolvedConfig, data: Mixture, model: Model) -> None:
    """Raise `UserError` if the run can neither resume from a checkpoint of its own nor start.

    `model` is on the meta device. The bytes of checkpoints are left to the ranks.
    """
    level: Literal["off", "size"] = "off" if config.checkpoint.verify == "off" else "size"
    found = newest_good(
        checkpoints(config.checkpoints),
        lambda path: read_verified(path, level),
        warn=lambda text: None,
    )
    if found:
        optimizer = build_optimizer(config, model)
        check_same_run(*found, config, data.fingerprint(), optimizer)
    elif (source := config.checkpoint.init_from) and weights_of(source, model) is None:
        open_source(place(source), "size", model)
