"""Models: plain modules that know no parallelism, by the name of their family."""

import torch

from torchmars.config import Config, ModelConfig
from torchmars.config.fields import require
from torchmars.config.model import model_class
from torchmars.core.check import meant
from torchmars.models.base import multiplied
from torchmars.models.model import Model

__all__ = ["Model", "build_meta_model", "build_model", "family", "build_run_model", "title"]


def family(name: str) -> type[Model]:
    """Return the class of the models called `name`. Raises `UserError` if a plugin has none."""
    found: type[Model] = model_class(name)
    wanted = f"model.name: the class of {name} must"
    require(isinstance(found, type) and issubclass(found, Model), f"{wanted} derive from Model")
    undefined = ", ".join(sorted(found.__abstractmethods__))
    require(not undefined, f"{wanted} define {undefined}")
    for field in ("inputs", "cuts"):
        require(hasattr(found, field), f"{wanted} have {field}")
    return found


def build_model(config: ModelConfig, vocab_size: int, seq_len: int) -> Model:
    """Make the model of a config on the current default device, its weights not yet initialised.

    `vocab_size` is the tokenizer's. Raises `UserError` for a shape that cannot be built.
    """
    kind = family(config.name)
    sizes = [*kind.settings.sizes]
    require(
        config.size in sizes,
        f'model.size = "{config.size}" is no size of model.name = "{config.name}": '
        + meant(config.size, sizes, f"it has {', '.join(sizes)}"),
    )
    args = config.args(kind.settings, vocab_size, seq_len)
    args.check()
    model = kind(args)
    missing = [field for field in Model.__annotations__ if not hasattr(model, field)]
    require(not missing, f"model.name: the class of {config.name} must have {', '.join(missing)}")
    return model


def title(config: ModelConfig) -> str:
    """Return a model's name: family and size, and changes of the size's shape."""
    size = family(config.name).settings.sizes[config.size]
    changed = [
        name for name in config.changed() if name in size and getattr(config, name) != size[name]
    ]
    return f"{config.name} {config.size}" + (f" except {', '.join(changed)}" if changed else "")


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
