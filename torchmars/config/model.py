"""Which model is trained."""

import importlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache, partial
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from torchmars.config.deepseek import DeepseekArgs
from torchmars.config.fields import Mark, require, with_settings
from torchmars.config.gpt2 import GPT2Args
from torchmars.config.llama import LlamaArgs
from torchmars.config.model_args import ModelArgs, family_fields
from torchmars.core.bounds import KeyOf, Range
from torchmars.core.errors import UserError, no_exit
from torchmars.core.help import documentation

A = TypeVar("A", bound=ModelArgs)

# Where the class of each family is, a `models.Model`: named, since its module imports torch.
MODELS = {
    "gpt2": "torchmars.models.gpt2.GPT2",
    "llama": "torchmars.models.llama.Llama",
    "deepseek": "torchmars.models.deepseek.Deepseek",
}
# What these classes have as `settings`.
OWN: dict[str, type[ModelArgs]] = {
    "gpt2": GPT2Args,
    "llama": LlamaArgs,
    "deepseek": DeepseekArgs,
}
INSTEAD = ", instead of the named size's"
VOCABULARY_MULTIPLE = 64  # rows of the token table: matrix units like whole tiles


def fields_of_families(families: Mapping[str, type[ModelArgs]]) -> dict[str, tuple[Any, Any, str]]:
    """Return the fields of [model] that families declare: type, default and `--help`."""
    settings = {name: family_fields(family) for name, family in families.items()}
    found: dict[str, tuple[Any, Any, str]] = {}
    for name, family in families.items():
        texts = documentation(family)
        for setting, (hint, default) in settings[name].items():
            text = texts[setting]
            if default is None:
                text = re.sub(r"\.(?= |$)", f"{INSTEAD}.", text, count=1)
            having = [each for each in families if setting in settings[each]]
            if len(having) < len(families):
                text = f"{', '.join(having)}: {text[:1].lower()}{text[1:]}"
            found.setdefault(setting, (hint, default, text))
    return found


@partial(with_settings, settings=fields_of_families(OWN))
@dataclass(frozen=True)
class ModelConfig:
    """Which model is trained."""

    name: Annotated[str, KeyOf(MODELS), Mark.IDENTITY] = "gpt2"
    """Model family. llama: also Mistral, Ministral, SmolLM3, OLMo 3, Qwen2, Qwen3, Qwen3-MoE,
    Mixtral and GLM-4.5. deepseek: models with latent attention, DeepSeek-V3, Moonlight, Kimi K2 and
    GLM-4.7-Flash."""
    size: Annotated[str, Mark.IDENTITY] = "nano"
    """Named size. gpt2: nano (3M, for CPUs), small (124M), medium (355M), large (774M), xl (1.6B).
    llama: nano (3M, for CPUs), 160m, the sizes of Llama 3 (1b, 3b, 8b, 70b, 405b) and of Qwen3
    (qwen3-0.6b, -1.7b, -4b, -8b, -14b, -32b), mistral-7b-v0.1, mistral-7b-v0.3, mistral-nemo,
    mistral-small-24b, ministral-8b, smollm-nano (for CPUs), smollm3-3b, olmo-nano (for CPUs),
    olmo3-7b and olmo3-32b; mixtures of experts are moe-nano and glm-nano (for
    CPUs), qwen3-30b-a3b, qwen3-235b-a22b, mixtral-8x7b, mixtral-8x22b, glm-4.5-air and glm-4.5.
    deepseek: nano (5M, for CPUs), moonlight-16b-a3b, glm-4.7-flash, deepseek-v3 and kimi-k2."""
    vocab_size: Annotated[Annotated[int, Range(1, 10_000_000)] | None, Mark.IDENTITY] = None
    """Rows of the token table. Default: the tokenizer's vocabulary, rounded up to a multiple of
    64."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:  # the settings of families
            ...

    def changed(self) -> list[str]:
        """Return the fields that are set instead of the named size's."""
        others = (each for each in fields(self) if each.name not in ("name", "size"))
        return [each.name for each in others if getattr(self, each.name) != each.default]

    def args(self, kind: type[A], vocab_size: int, seq_len: int) -> A:
        """Return what a model of the family with the settings `kind` is made from.

        `vocab_size` is the tokenizer's. Raises `UserError` for a setting that it does not have.
        """
        changed = {name: getattr(self, name) for name in self.changed()}
        known = {each.name for each in fields(kind)}
        for name in changed:
            require(
                name in known,
                f'model.{name} has no meaning for model.name = "{self.name}": remove it',
            )
        padded = -(-vocab_size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
        size = kind.sizes[self.size]
        return kind(**{"vocab_size": padded, "seq_len": seq_len} | dict(size) | changed)


def plugins_family(name: str) -> type[ModelArgs] | None:
    """Return the settings of the model called `name`, if a plugin has it.

    Raises `UserError` for a plugin whose model has none.
    """
    if name in OWN or name not in MODELS:
        return None
    return family_settings(model_class(name), MODELS[name])


def model_section(name: str) -> type[ModelConfig]:
    """Return the section [model] of the model called `name`, with a plugin's own settings.

    Errors: as `plugins_family`.
    """
    family: Any = plugins_family(name)
    return ModelConfig if family is None else section_with(family)


@cache
def section_with(family: Any) -> type[ModelConfig]:
    """Return the section [model] with the settings of a plugin's family."""
    return with_settings(ModelConfig, fields_of_families({"": family}))


def model_class(name: str) -> Any:
    """Return the class of the models called `name`. Raises `UserError` if a plugin has none."""
    module, _, kind = MODELS[name].rpartition(".")
    try:
        with no_exit():
            return getattr(importlib.import_module(module), kind)
    except Exception as error:  # whatever the code of a plugin raises
        raise UserError(f"model.name: the class {MODELS[name]} cannot be had: {error}") from None


def family_settings(kind: Any, place: str) -> type[ModelArgs]:
    """Return the settings that a model's class, which is at `place`, declares.

    Raises `UserError` if they cannot be used.
    """
    found: Any = getattr(kind, "settings", None)
    require(
        isinstance(found, type) and issubclass(found, ModelArgs),
        f"model.name: the class {place} must have settings, a class that derives from ModelArgs "
        f"(torchmars.config.model_args), got {found!r}",
    )
    sizes = getattr(found, "sizes", None)
    require(
        isinstance(sizes, Mapping) and bool(sizes),
        f"model.name: the class {place} must have settings with named sizes",
    )
    return found
