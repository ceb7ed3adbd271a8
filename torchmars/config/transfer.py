"""The base whose learning rates a model of another shape takes."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache, partial
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from torchmars.config.fields import Mark, require, with_settings
from torchmars.config.model import INSTEAD, OWN, fields_of_families, plugins_family
from torchmars.config.model_args import ModelArgs

NOT_SHAPE = ("size", "depth", "decay")


def is_whole(hint: Any) -> bool:
    """Return whether a setting of a model is a whole number: such ones make its shape.

    Unless they are marked as no part of it.
    """
    if get_origin(hint) is Annotated:
        return is_whole(get_args(hint)[0]) and Mark.NO_SHAPE not in hint.__metadata__
    if get_origin(hint) in (Union, UnionType):
        return all(is_whole(each) for each in get_args(hint) if each is not NoneType)
    return hint is int


def shape_fields(families: Mapping[str, type[ModelArgs]]) -> dict[str, tuple[Any, Any, str]]:
    """Return the fields of [transfer] that families declare: type, default and `--help`."""
    return {
        name: (
            Annotated[hint | None, Mark.IDENTITY],
            None,
            f"{text.replace(INSTEAD, '')} Of the base.",
        )
        for name, (hint, _, text) in fields_of_families(families).items()
        if is_whole(hint)
    }


@partial(with_settings, settings=shape_fields(OWN))
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


def transfer_section(name: str) -> type[TransferConfig]:
    """Return the section [transfer] of the model called `name`, with a plugin's own shape.

    Raises `UserError` for a plugin whose model has none.
    """
    family: Any = plugins_family(name)
    return TransferConfig if family is None else transfer_with(family)


@cache
def transfer_with(family: Any) -> type[TransferConfig]:
    """Return the section [transfer] with the shape of a plugin's family."""
    return with_settings(TransferConfig, shape_fields({"": family}))
