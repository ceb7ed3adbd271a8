"""Checkpoints whose state tensors have former names: read as what they are today.

Until Lion and Muon kept buffers that do not depend on the betas, these were scaled by them and
called "momentum".
"""

from collections.abc import Collection

from torch import nn

from torchmars.checkpoint.manifest import CheckpointManifest
from torchmars.config.load import config_from_tables
from torchmars.optim import param_groups
from torchmars.optim.rules import current_name, unscaling


def current_names(saved: dict[str, str]) -> dict[str, str]:
    """A manifest's `optimizer`, with the names that its rules' state tensors have today."""
    result = {}
    for name, words in saved.items():
        rule, *keys = words.split() or [""]
        result[name] = " ".join([rule, *sorted(current_name(rule, key) for key in keys)])
    return result


def former_names(
    manifest: CheckpointManifest, model: nn.Module, state: Collection[str], saved: Collection[str]
) -> dict[str, tuple[str, float]]:
    """For each name of `state` that a checkpoint has under a former one: that, and a factor.

    What is read is multiplied by the factor. `saved` are the checkpoint's names, `model` is of the
    same parameters. The betas are those of the config that the checkpoint was made with.
    """
    if current_names(manifest.optimizer) == manifest.optimizer:
        return {}
    found = {}
    settings = config_from_tables(manifest.config, "in the checkpoint").optimizer.settings()
    for group in param_groups(model, **settings):
        for name, _ in group["params"]:
            old = f"optimizer.{name}.momentum"
            new = f"optimizer.{name}.{current_name(group['rule'], 'momentum')}"
            if old != new and old in saved and new in state:
                found[new] = old, unscaling(group["rule"], group["betas"])
    return found
