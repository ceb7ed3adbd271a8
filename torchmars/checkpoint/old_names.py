"""Maps the names in old checkpoints to those of today.

Entries of the manifest, keys of its config among them, are renamed where the manifest is read.

State tensors are renamed where they are read. Until Lion and Muon kept buffers that do not depend
on the betas, these were scaled by them and called "momentum".

Some releases kept the squared norm of each last gradient too: it is left out.
"""

from collections.abc import Collection
from typing import Any

from torch import nn

from torchmars.config.load import config_from_tables
from torchmars.optim import param_groups
from torchmars.optim.rules import DROPPED, current_name, unscaling

# By the last version of the format that has the old name (see `Format.renamed`). The key steps of
# the config's section training is "config.training.steps".
RENAMED = {
    2: {"data": "data_fingerprint"},
    3: {"config.data.corpus": "config.data.source"},
}


def current_names(saved: dict[str, str]) -> dict[str, str]:
    """Return a manifest's `optimizer` with the state tensors that it would name today."""
    result = {}
    for name, words in saved.items():
        rule, *keys = words.split() or [""]
        kept = sorted(current_name(rule, key) for key in keys if key not in DROPPED)
        result[name] = " ".join([rule, *kept])
    return result


def names_in_checkpoint(
    optimizer: dict[str, str],
    config: dict[str, Any],
    model: nn.Module,
    state: Collection[str],
    saved: Collection[str],
) -> dict[str, tuple[str, float]]:
    """Return, for each renamed tensor of `state`, its name in the checkpoint and a factor.

    What is read is multiplied by the factor. `optimizer` and `config` are those of the manifest:
    the factor depends on the betas that the checkpoint was made with. `saved` are the names of the
    checkpoint's tensors, `model` is of the same parameters.
    """
    if current_names(optimizer) == optimizer:
        return {}
    found = {}
    settings = config_from_tables(config, "in the checkpoint").optimizer.settings()
    for group in param_groups(model, **settings):
        for name, _ in group["params"]:
            old = f"optimizer.{name}.momentum"
            new = f"optimizer.{name}.{current_name(group['rule'], 'momentum')}"
            if old != new and old in saved and new in state:
                found[new] = old, unscaling(group["rule"], group["betas"])
    return found
