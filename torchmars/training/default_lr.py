"""A warning where the default learning rate meets a model that it was not published for."""

from torchmars.config import ResolvedConfig
from torchmars.config.presets import Preset, read_presets
from torchmars.data.named_tokenizers import load_tokenizer
from torchmars.models import build_run_model
from torchmars.models.base import base_of

PUBLISHED = 124e6  # parameters of GPT-2 small: the defaults are the rates published for it
NEAR = 2  # a model of about that size has at most this many times more or fewer


def default_lr_warnings(config: ResolvedConfig) -> list[str]:
    """Return a warning for a run that leaves optimizer.lr at its default, in lines, or none.

    Of a model with a base the base's size counts. It names the preset of the model's size and rule,
    where there is one.
    """
    vocab_size = load_tokenizer(config.data.tokenizer).vocab_size
    model = build_run_model(config, vocab_size)
    if config.transfer.named:  # optimizer.lr is for that
        model = base_of(model, config.transfer)
    parameters = model.parameter_count
    if PUBLISHED / NEAR <= parameters <= PUBLISHED * NEAR:
        return []
    whose = "the base" if config.transfer.named else "this one"
    preset = fitting_preset(config)
    remedy = (
        f"the preset {preset.name} has {preset.settings['optimizer']['lr']:g}"
        if preset
        else "torchmars lr-find proposes rates"
    )
    return [
        f"optimizer.lr is not set, and its default {config.optimizer.lr:g} is a rate for models of "
        f"124 million parameters; {whose} has {parameters:,}: set it; {remedy}"
    ]


def fitting_preset(config: ResolvedConfig) -> Preset | None:
    """Return a preset of the same model and rule that sets a learning rate; None without one."""
    model, rule = config.model, config.optimizer.name
    # A preset of Qwen3 is called by its size: qwen3-8b is a size of llama.
    prefixes = f"{model.name}-{model.size}-{rule}-", f"{model.size}-{rule}-"
    return next(
        (
            preset
            for preset in read_presets().values()
            if preset.name.startswith(prefixes)
            and "-exact-" not in preset.name
            and "lr" in preset.settings["optimizer"]
        ),
        None,
    )
