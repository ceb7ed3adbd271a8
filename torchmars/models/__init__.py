"""Models: plain modules that know no parallelism, by the name of their family."""

import contextlib

import torch

from torchmars.config import Config, ModelConfig
from torchmars.config.fields import require
from torchmars.config.model import MODELS, OWN, family_settings, model_class
from torchmars.core.errors import UserError
from torchmars.core.typed import nearest
from torchmars.models.base import multiplied
from torchmars.models.model import Model

__all__ = ["Model", "build_meta_model", "build_model", "family", "build_run_model", "title"]


def family(name: str) -> type[Model]:
    """Return the class of the models called `name`. Raises `UserError` if a plugin has none."""
    found: type[Model] = model_class(name)
    wanted = f"model.name: the class {MODELS[name]} must"
    require(isinstance(found, type) and issubclass(found, Model), f"{wanted} derive from Model")
    undefined = ", ".join(sorted(found.__abstractmethods__))
    require(not undefined, f"{wanted} define {undefined}")
    for field in ("inputs", "cuts"):
        require(hasattr(found, field), f"{wanted} have {field}")
    family_settings(found, MODELS[name])
    return found


def build_model(config: ModelConfig, vocab_size: int, seq_len: int) -> Model:
    """Make the model of a config on the current default device, its weights not yet initialised.

    `vocab_size` is the tokenizer's. Raises `UserError` for a shape that cannot be built.
    """
    kind = family(config.name)
    if config.size not in kind.settings.sizes:
        raise unknown_size(config)
    args = config.args(kind.settings, vocab_size, seq_len)
    args.check()
    model = kind(args)
    missing = [field for field in Model.__annotations__ if not hasattr(model, field)]
    require(not missing, f"model.name: {MODELS[config.name]} must have {', '.join(missing)}")
    return model


def title(config: ModelConfig) -> str:
    """Return a model's name: family and size, and changes of the size's shape."""
    size = family(config.name).settings.sizes[config.size]
    changed = [
        name for name in config.changed() if name in size and getattr(config, name) != size[name]
    ]
    return f"{config.name} {config.size}" + (f" except {', '.join(changed)}" if changed else "")


def unknown_size(config: ModelConfig) -> UserError:
    """Return the error of a size that the family does not have."""
    size, sizes = config.size, list(family(config.name).settings.sizes)
    others = []
    for name in MODELS:
        with contextlib.suppress(UserError):  # a plugin's, which cannot be had
            others += [name] if size in family(name).settings.sizes else []
    if others and config.name in OWN:
        remedy = f"it is a size of {others[0]}: --model.name {others[0]}"
    elif near := nearest(size, sizes):
        remedy = f'did you mean "{near}"?'
    else:  # the author of a plugin means this family, whatever others have
        remedy = f"--model.size {sizes[0]} is one"
    return UserError(
        f'model.size = "{size}" is no size of model.name = "{config.name}", which has '
        f"{', '.join(sizes)}; {remedy}"
    )


def build_meta_model(config: ModelConfig, vocab_size: int, seq_len: int) -> Model:
    """Make the model of a config without memory: its shapes and names. As `build_model`."""
    with torch.device("meta"):
        return build_model(config, vocab_size, seq_len)


def build_run_model(config: Config, vocab_size: int) -> Model:
    """Make the model of a run without memory, as its [model] and [transfer] say.

    All that trains or uses a run's model makes it here. Raises `UserError`.
    """
    model = build_meta_model(config.model, vocab_size, config.training.seq_len)
    with torch.device("meta"):
        return multiplied(model, config.transfer)
