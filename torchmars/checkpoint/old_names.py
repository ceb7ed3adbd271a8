"""Maps the names in old checkpoints to those of today.

Entries of the manifest, keys of its config among them, are renamed where the manifest is read.

State tensors are renamed where they are read. Until Lion and Muon kept buffers that do not depend
on the betas, these were scaled by them and called "momentum".

The squared norm of a last gradient came later. Where a checkpoint lacks it, it is not known (NaN),
and the first step reads that gradient.
"""

from collections.abc import Collection
from typing import Any

from torch import nn

from torchmars.config.load import config_from_tables
from torchmars.optim import param_groups
from torchmars.optim.rules import current_name, unscaling
from torchmars.optim.rules.rule import SQUARED_NORM

# By the last version of the format that has the old name (see `Format.renamed`). The key steps of
# the config's section training is "config.training.steps".
RENAMED = {
    2: {"data": "data_fingerprint"},
    3: {"config.data.corpus": "config.data.source"},
}


def current_names(saved: dict[str, str]) -> dict[str, str]:
    """Return a manifest's `optimizer` as it would be today: renamed, with the squared norms."""
    result = {}
    for name, words in renamed(saved).items():
        rule, *keys = words.split() or [""]
        norms = {SQUARED_NORM} if "last_grad" in keys else set()
        result[name] = " ".join([rule, *sorted({*keys} | norms)])
    return result


def renamed(saved: dict[str, str]) -> dict[str, str]:
    """Return a manifest's `optimizer` with old names of state tensors made those of today."""
    result = {}
    for name, words in saved.items():
        rule, *keys = words.split() or [""]
        result[name] = " ".join([rule, *sorted(current_name(rule, key) for key in keys)])
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
    if renamed(optimizer) == optimizer:
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
