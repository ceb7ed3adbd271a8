"""Which model is trained, and the base whose learning rates it takes.

A family of models declares its settings in a class of its own (model_args.py). From that follow the
fields of [model] and of [transfer].
"""

import importlib
from dataclasses import dataclass, field, fields, make_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from torchmars.config.fields import Mark, remade, require
from torchmars.config.model_args import ModelArgs, family_fields
from torchmars.core.check import Interval, KeyOf
from torchmars.core.errors import UserError

A = TypeVar("A", bound=ModelArgs)

# The class of each family, a `models.Model`. Ours are named, since their modules import torch.
MODELS: dict[str, Any] = {
    "gpt2": "torchmars.models.gpt2.GPT2",
    "llama": "torchmars.models.llama.Llama",
    "deepseek": "torchmars.models.deepseek.Deepseek",
}
# What these classes have as `settings`, of which a run needs one.
OWN = {
    "gpt2": "torchmars.config.gpt2.GPT2Args",
    "llama": "torchmars.config.llama.LlamaArgs",
    "deepseek": "torchmars.config.deepseek.DeepseekArgs",
}
VOCABULARY_MULTIPLE = 64  # rows of the token table: matrix units like whole tiles
NOT_SHAPE = ("size", "depth", "decay")


@dataclass(frozen=True)
class ModelConfig:
    """Which model is trained. What is not set of its family's settings follows from the size."""

    name: Annotated[str, KeyOf(MODELS), Mark.IDENTITY] = "gpt2"
    """Model family. llama: also Mistral, Ministral, SmolLM3, OLMo 3, Qwen2, Qwen3, Qwen3-MoE,
    Mixtral and GLM-4.5. deepseek: models with latent attention, DeepSeek-V3, Moonlight, Kimi K2 and
    GLM-4.7-Flash. Its settings: --help model --model.name NAME."""
    size: Annotated[str, Mark.IDENTITY] = "nano"
    """Named size: docs/config.md lists them, with their parameters."""
    vocab_size: Annotated[Annotated[int, Interval(ge=1, le=10_000_000)] | None, Mark.IDENTITY] = (
        None
    )
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

        `vocab_size` is the tokenizer's.
        """
        changed = {name: getattr(self, name) for name in self.changed()}
        padded = -(-vocab_size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
        size = kind.sizes[self.size]
        return kind(**{"vocab_size": padded, "seq_len": seq_len} | dict(size) | changed)


@dataclass(frozen=True)
class TransferConfig:
    """The base whose learning rates this model takes: a smaller one, at which they were tuned.

    Off unless it names a base, by a size or by the fields of its shape that differ from this
    model's. What [optimizer] and [schedule] say of rates, eps and decay is then the base's, and
    what each tensor gets follows from its shape there and here.
    """

    size: Annotated[str | None, Mark.IDENTITY] = None
    """Named size of the base, as model.size: its shape is taken, all else is this model's."""
    depth: Annotated[Literal["none", "1/L", "1/sqrt(L)"], Mark.IDENTITY] = "none"
    """What each block adds is multiplied by, where L is how many times as many blocks as the base
    has. none: initial values alone shrink with depth. 1/L lets rates stay best in deep models."""
    decay: Annotated[Literal["kept", "coupled"], Mark.IDENTITY] = "kept"
    """kept: a tensor whose rate falls has more weight decay, so that their product stays. coupled:
    optimizer.weight_decay as it is, so that the product falls with the rate."""

    def shape(self) -> dict[str, int]:
        """Return the fields of the base's shape that are set."""
        values = {name: value for name, value in vars(self).items() if name not in NOT_SHAPE}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def named(self) -> bool:
        """Whether it names a base."""
        return self.size is not None or bool(self.shape())

    def check(self) -> None:
        """Raise `UserError` for settings without a base."""
        for each in fields(self):
            require(
                self.named or getattr(self, each.name) == each.default,
                f"transfer.{each.name} has no meaning without a base: name it by transfer.size or "
                "by fields of its shape, such as transfer.n_embd",
            )


def model_section(name: str = ModelConfig.name) -> type[ModelConfig]:
    """Return the section [model] of the model called `name`. Raises `UserError`."""
    family: Any = family_settings(name)
    return _sections(name, family)[0]


def transfer_section(name: str = ModelConfig.name) -> type[TransferConfig]:
    """Return the section [transfer] of the model called `name`. Raises `UserError`."""
    family: Any = family_settings(name)
    return _sections(name, family)[1]


@cache
def _sections(name: str, family: Any) -> tuple[type[ModelConfig], type[TransferConfig]]:
    own = {"name": (Annotated[str, KeyOf(MODELS), Mark.IDENTITY], name)} | family_fields(family)
    shape = shape_fields(family).items()
    of_base = {name: (Annotated[hint | None, Mark.IDENTITY], None) for name, hint in shape}
    return (
        _with_fields(model_section, name, ModelConfig, family, own),
        _with_fields(transfer_section, name, TransferConfig, family, of_base),
    )


def _with_fields(
    section: Any, name: str, kind: Any, family: type, more: dict[str, tuple[Any, Any]]
) -> Any:
    """Return the section `kind` with fields, each a type and a default, that a family declares.

    `section` returns it again for `name`.
    """
    same = {"__module__": kind.__module__, "__doc__": kind.__doc__, "documented_by": (family,)}
    same["__reduce__"] = lambda self: (remade, (section, name, vars(self)))
    made = [(name, hint, field(default=default)) for name, (hint, default) in more.items()]
    return make_dataclass(kind.__name__, made, bases=(kind,), frozen=True, namespace=same)


def model_config(name: str = ModelConfig.name, **settings: Any) -> ModelConfig:
    """Return the section [model] of the model called `name` with these settings."""
    return model_section(name)(name=name, **settings)


def shape_fields(family: type[ModelArgs]) -> dict[str, Any]:
    """Return the types of a family's settings that make a model's shape, by name.

    They are the whole numbers, but for those that are marked as no part of it.
    """
    return {name: hint for name, (hint, _) in family_fields(family).items() if is_whole(hint)}


def is_whole(hint: Any) -> bool:
    """Return whether a setting of a model is a whole number of its shape."""
    if get_origin(hint) is Annotated:
        return is_whole(get_args(hint)[0]) and Mark.NO_SHAPE not in hint.__metadata__
    if get_origin(hint) in (Union, UnionType):
        return all(is_whole(each) for each in get_args(hint) if each is not NoneType)
    return hint is int


def family_settings(name: str) -> type[ModelArgs]:
    """Return the settings of the family called `name`.

    Raises `UserError` for a name that nobody has registered, and for a class without settings.
    """
    try:
        KeyOf(MODELS).check(name)
    except ValueError as error:
        raise UserError(f"model.name {error}") from None
    # The classes of our models bring torch, which their settings do not.
    own = name in OWN
    found: Any = imported(OWN[name]) if own else getattr(model_class(name), "settings", None)
    good = isinstance(found, type) and issubclass(found, ModelArgs) and getattr(found, "sizes", {})
    require(
        bool(good),
        f"model.name: the class of {name} must have settings, a class that derives from ModelArgs "
        f"(torchmars.config.model_args) and has named sizes, got {found!r}",
    )
    kind: type[ModelArgs] = found
    return kind


def model_class(name: str) -> Any:
    """Return the class of the models called `name`."""
    found = MODELS[name]
    return imported(found) if isinstance(found, str) else found


def imported(name: str) -> Any:
    """Return what a module of ours has, by its dotted name."""
    module, _, kind = name.rpartition(".")
    return getattr(importlib.import_module(module), kind)
