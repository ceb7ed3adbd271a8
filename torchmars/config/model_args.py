"""What a model of any family is made from: the settings that the family declares."""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Annotated, Any, ClassVar, NamedTuple, get_type_hints

from torchmars.config.fields import Mark

Sizes = Mapping[str, Mapping[str, Any]]


class Multipliers(NamedTuple):
    """What a model that takes the learning rates of another shape multiplies: [transfer]."""

    logits: float = 1.0
    """Hidden states before the head."""
    residual: float = 1.0
    """What an attention, an MLP or a mixture of a block adds to the residual stream."""
    attention: float = 1.0
    """Attention logits, beside one over the root of a head's width."""

    def __str__(self) -> str:
        return ", ".join(f"{name} {value:g}" for name, value in self._asdict().items())

    def attention_scale(self, head_width: int) -> float | None:
        """Return the `scale` of `CausalAttention`."""
        return None if self.attention == 1 else self.attention * head_width**-0.5


@dataclass(frozen=True, kw_only=True)
class ModelArgs:
    """What a model of any family is made from. A family's own class derives from this.

    Each field that it adds is a setting in [model]: its type has the bounds, the text below it is
    its `--help`. Another value is another run, unless `Mark.CHANGEABLE` says otherwise.
    """

    sizes: ClassVar[Sizes]
    """The named sizes: of each the values of some settings."""
    grows: ClassVar[tuple[str, ...]] = ()
    """The settings that grow with the width, in proportion, where heads keep theirs."""

    vocab_size: int
    """Rows of the token table."""
    seq_len: int
    """Tokens that the model takes at most."""
    multipliers: Multipliers = Multipliers()
    """All 1 unless the config has a [transfer]."""

    def check(self) -> None:
        """Raise `UserError` for a shape that cannot be built."""


COMMON = {each.name for each in fields(ModelArgs)}


def family_fields(family: type[ModelArgs]) -> dict[str, tuple[Any, Any]]:
    """Return the type and the default of each setting of a family, as [model] has them.

    A setting that a named size has a value for is None by default: it follows from the size.
    """
    hints = get_type_hints(family, include_extras=True)
    given = {name for size in family.sizes.values() for name in size}
    found: dict[str, tuple[Any, Any]] = {}
    for each in fields(family):
        if each.name not in COMMON:
            hint, default = hints[each.name], each.default
            same_run = Mark.CHANGEABLE in getattr(hint, "__metadata__", ())
            if each.name in given or default is MISSING:
                hint, default = hint | None, None
            # Outside, where it is looked for.
            found[each.name] = hint if same_run else Annotated[hint, Mark.IDENTITY], default
    return found
