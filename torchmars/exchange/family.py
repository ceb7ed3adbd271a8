"""What a family of models is in Hugging Face's transformers: its kinds, configs and tensors.

Each family of ours has a file of its own, and a plugin registers one `Family` in families.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchmars.core.errors import UserError
from torchmars.models.model import Model

WIDTHS = {"n_expert_inner": "expert_width", "head_dim": "head_width"}  # also where none is set
MAY_BE_0 = ("norm_eps", "n_dense", "q_lora_rank", "routed_scaling")


@dataclass(frozen=True)
class Counterpart:
    """A tensor there: its name, and whether it is our weight [out, in] transposed."""

    name: str
    transposed: bool = False
    experts: int = 0
    """Of a stack whose matrices are a tensor each. The name has "*" for the expert's number."""
    half: int | None = None
    """Which half of the rows of each matrix it is, where two stacks are one tensor."""

    @property
    def names(self) -> list[str]:
        """The names of all tensors there."""
        return [self.name.replace("*", str(n)) for n in range(self.experts)] or [self.name]


@dataclass(frozen=True)
class ModelKind:
    """A kind of models there, which config.json calls its model_type."""

    keys: Mapping[str, str]
    """The key of each of our settings, in the order of config.json. One is `n_layer`."""
    allowed: Mapping[str, Sequence[Any]]
    """The values that our models can have of a key, first the one that is written."""
    reads: Sequence[str] = ()
    """All other keys that `Family.section` reads. No other key reaches transformers' class."""


class Family:
    """A family of models: the same ones there, both ways."""

    model: type[Model]
    """Our class."""
    kinds: Mapping[str, ModelKind]
    """By the model_type of config.json."""
    names: Mapping[str, str]
    """The name there of each part of a tensor's name. A dotted one goes before its parts."""
    base = "model."
    """What begins all names there but the head's. A model saved without its head lacks it."""

    def section(self, kind: str, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the section [model] of a config.json, and its `seq_len` beside it.

        `config` has the keys of the kind as transformers' class has them, and the values that are
        allowed. Raises `UserError` for what our models cannot do.
        """
        raise NotImplementedError

    def config(self, model: Any) -> dict[str, Any]:
        """Return the config.json of `model`, without what concerns its tokenizer.

        Raises `UserError` for a shape that no class there has.
        """
        raise NotImplementedError

    def counterparts(self, model: Model, fused: bool) -> dict[str, Counterpart]:
        """Return the tensor there of each parameter and buffer of `model`, by our name.

        `fused`: experts are in stacks, as transformers 5 holds them. In most files each matrix is a
        tensor.
        """
        return {name: Counterpart(their_name(name, self.names)) for name in model.state_dict()}

    def with_their_parameters(self, model: Model) -> Model:
        """Return `model`, without memory, with all parameters that its kind has there."""
        return model

    def left_out(self, model: Model) -> tuple[str, ...]:
        """Return prefixes of tensors there that `model` has no use for."""
        return ()


def their_name(name: str, names: Mapping[str, str]) -> str:
    """Return a parameter's name there: every part of `name` by the table `names`."""
    owner, _, last = name.rpartition(".")
    for dotted in (key for key in names if "." in key and owner.endswith(key)):
        owner = owner.removesuffix(dotted) + names[dotted]
    return ".".join([*(names.get(part, part) for part in owner.split(".")), last])


def shape_of(kind: ModelKind, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that have a key there. Raises `UserError` for one that is no number."""
    return {
        ours: config[name]  # true or false
        if name in kind.allowed
        else number(config, name, 0 if ours in MAY_BE_0 else 1)
        for ours, name in kind.keys.items()
    }


def keys_of(kind: ModelKind, args: Any) -> dict[str, Any]:
    """Return the keys of a kind: of what is allowed the first value, and the settings of `args`."""
    fixed = {name: values[0] for name, values in kind.allowed.items()}
    return fixed | {name: getattr(args, WIDTHS.get(ours, ours)) for ours, name in kind.keys.items()}


def require_all(config: Mapping[str, Any], allowed: Mapping[str, Sequence[Any]]) -> None:
    """Raise `UserError` for a key with another value than is allowed. Null must be too."""
    for name, values in allowed.items():
        if name in config and config[name] not in values:
            known = ", ".join(repr(value) for value in values if value is not None) or "null"
            raise UserError(
                f"its {name} is {config[name]!r}: only models with {known} can be imported"
            )


def number(config: Mapping[str, Any], name: str, least: int = 0) -> Any:
    """Return a key's value that is reckoned with. Raises `UserError` if it is no such number."""
    value = config.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= least:
        raise UserError(f"its {name} is {value!r:.80}: it must be a number, at least {least}")
    return value
