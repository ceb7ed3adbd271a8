"""What a model is made from: the settings that its family declares, and those of decoders."""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, get_type_hints

from torchmars.config.fields import Mark
from torchmars.core.check import Interval
from torchmars.core.errors import UserError

Sizes = Mapping[str, Mapping[str, Any]]
# Llama 3.1 was trained on so many tokens before its rotary positions were stretched.
LLAMA3_CONTEXT = 8192


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


@dataclass(frozen=True, kw_only=True)
class DecoderArgs(ModelArgs):
    """What a decoder with RMS norms, rotary positions and, perhaps, experts is made from."""

    n_layer: Annotated[int, Interval(ge=1, le=1_000)]
    """Number of blocks."""
    n_head: Annotated[int, Interval(ge=1, le=10_000)]
    """Attention heads of each block."""
    n_embd: Annotated[int, Interval(ge=1, le=1_000_000)]
    """Width."""
    n_inner: Annotated[int, Interval(ge=1, le=10_000_000)]
    """Width within the MLP."""

    norm_eps: Annotated[float, Interval(ge=0, le=1)] = 1e-5
    """Added to the mean square in RMSNorm."""
    tied: bool = False
    """Let the token table be the head too."""

    rope_theta: Annotated[float, Interval(ge=1, le=1e12)] = 10_000.0
    """Base of the wavelengths of rotary positions."""
    rope_scaling_factor: Annotated[float, Interval(ge=1, le=1_000)] = 1.0
    """Stretch rotary wavelengths by this, in the way of rope_scaling. 1: leave them."""
    rope_scaling: Literal["llama3", "linear", "yarn"] = "llama3"
    """Which wavelengths rope_scaling_factor stretches. llama3: long ones. linear: all. yarn: those
    that turn less than rope_beta_fast times in rope_original_len tokens."""
    rope_original_len: Annotated[int, Interval(ge=1, le=100_000_000), Mark.NO_SHAPE] | None = None
    """Tokens that the model took before the stretching. Default with llama3: 8192."""
    rope_beta_fast: Annotated[float, Interval(ge=0.001, le=10_000)] = 32.0
    """Of yarn: wavelengths that turn as often as this in rope_original_len tokens stay."""
    rope_beta_slow: Annotated[float, Interval(ge=0.001, le=10_000)] = 1.0
    """Of yarn: those that turn only as often as this are stretched by the whole factor."""
    rope_attention_factor: Annotated[float, Interval(ge=0.001, le=1_000)] | None = None
    """Of yarn: the factor of rotated queries and keys. Default: 0.1 ln(rope_scaling_factor) + 1."""

    n_expert: Annotated[int, Interval(ge=0, le=10_000)] = 0
    """Experts of each block. 0: one MLP for all tokens."""
    n_dense: Annotated[int, Interval(ge=0, le=1_000)] = 0
    """First blocks that have one MLP for all tokens instead of experts."""
    n_expert_used: Annotated[int, Interval(ge=1, le=1_000)] = 2
    """Experts that each token uses."""
    n_expert_inner: Annotated[int, Interval(ge=1, le=10_000_000)] | None = None
    """Width within an expert. That is n_inner where the size has none."""
    n_expert_shared: Annotated[int, Interval(ge=0, le=1_000)] = 0
    """Experts that all tokens use besides. They are one MLP of width n_expert_shared *
    n_expert_inner."""
    router: Literal["softmax", "sigmoid"] = "softmax"
    """How a router's logits become scores. softmax: over all experts. sigmoid: of each alone, and
    experts are chosen by score and a bias, as in GLM-4.5."""
    norm_topk_prob: bool = True
    """Divide the weights of a token's experts by their sum, as Mixtral does."""
    routed_scaling: Annotated[float, Interval(ge=0.001, le=1_000)] = 1.0
    """The factor of the outputs of a token's chosen experts."""

    @property
    def expert_width(self) -> int:
        """Width within an expert."""
        return self.n_expert_inner or self.n_inner

    def window_of(self, number: int) -> int | None:
        """Return how many tokens one attends to in block `number`; None: all before it."""
        return None

    def rope_letter(self, number: int) -> str:
        """Return whether block `number` has rotary positions ("r"), unscaled ones ("u") or none."""
        return "r"

    @property
    def groups(self) -> tuple[int, int]:
        """How many groups of experts there are, and how many of them a token chooses."""
        return 1, 1

    @property
    def original_len(self) -> int:
        """Tokens before the stretching of rotary positions."""
        return self.rope_original_len or LLAMA3_CONTEXT

    def check_rope(self) -> None:
        """Raise `UserError` for rotary positions that cannot be computed."""
        if self.rope_scaling == "yarn" and self.rope_original_len is None:
            raise UserError(
                'model.rope_scaling = "yarn" needs model.rope_original_len: set it to the tokens '
                "that the model took before"
            )
        own = {"rope_beta_fast": 32.0, "rope_beta_slow": 1.0, "rope_attention_factor": None}
        for name, default in own.items() if self.rope_scaling != "yarn" else ():
            if getattr(self, name) != default:
                raise UserError(f'model.{name} has no meaning without model.rope_scaling = "yarn"')

    def check_experts(self) -> None:
        """Raise `UserError` for experts that cannot be built."""
        if not self.n_expert:
            none = {"n_expert_shared": 0, "n_dense": 0, "router": "softmax", "routed_scaling": 1.0}
            own = {name: getattr(self, name) for name in none}
            names = [name for name, value in own.items() if value != none[name]]
            if names:
                raise UserError(
                    f"{', '.join(f'model.{name} = {own[name]}' for name in names)} has no meaning "
                    f"without experts: set it to {', '.join(str(none[name]) for name in names)}, "
                    "or model.n_expert to more than 0"
                )
            return
        if self.n_expert_used > self.n_expert:
            raise UserError(
                f"model.n_expert_used = {self.n_expert_used} is more than model.n_expert = "
                f"{self.n_expert}: choose at most as many"
            )
        if self.n_dense >= self.n_layer:
            raise UserError(
                f"model.n_dense = {self.n_dense} leaves no block of model.n_layer = {self.n_layer} "
                "for experts: lower it, or set model.n_expert = 0"
            )
