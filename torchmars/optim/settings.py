"""The types of an optimizer's settings, and the settings that several rules share.

A rule declares its settings. What follows from them: which settings a parameter group may have, the
checks, the defaults of `MARS`, the section of the config and its `--help`. Needs no torch.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

Settings = dict[str, Any]  # of an optimizer by its name, or of a parameter group


@dataclass(frozen=True)
class Setting:
    """A setting of a rule. A rule has it with a default of its own: `LR.of(6e-3)`."""

    name: str
    meaning: str
    """Its meaning, in a sentence or two, for `--help`."""
    default: Any = None
    scope: Literal["both", "optimizer", "group"] = "both"
    """Who has it: each parameter group, or the optimizer whose groups follow from it, or both."""

    def of(self, default: Any) -> "Setting":
        """Return the same setting with another default."""
        return replace(self, default=default)

    def judge(self, value: Any) -> tuple[bool, str]:
        """Return whether a value is good, and the requirement. May raise for another type."""
        raise NotImplementedError

    def check(self, value: Any, suffix: str = "") -> None:
        """Raise `ValueError` for a bad value. The message has the setting's name and `suffix`."""
        try:
            good, wanted = self.judge(value)
        except (TypeError, ValueError, RuntimeError, OverflowError):  # not one number
            good, wanted = False, "numbers" if isinstance(self, Betas) else "a number"
        if not good:
            raise ValueError(f"{self.name}{suffix} must be {wanted}, got {shown(value)}")


@dataclass(frozen=True)
class Number(Setting):
    """A number of at least 0; a `positive` one is more than 0, an `optional` one may be None."""

    positive: bool = False
    optional: bool = False

    def judge(self, value: Any) -> tuple[bool, str]:
        if value is None and self.optional:
            return True, ""
        if getattr(value, "is_cpu", True) is False:  # a GPU's tensor: nobody waits for it
            return value.numel() == 1, "one number"
        number = float(value + 0)  # a text is none
        if not self.positive:
            return 0 <= number < math.inf, "at least 0"
        return number > 0, "more than 0" + (", or None for no clip" if self.optional else "")


@dataclass(frozen=True)
class Betas(Setting):
    """Two decay rates."""

    def judge(self, value: Any) -> tuple[bool, str]:
        good = len(value) == 2 and all(0 <= beta < 1 for beta in value)
        return good, "two numbers in [0, 1)"


@dataclass(frozen=True)
class Flag(Setting):
    """Yes or no; an `automatic` one may be "auto", too."""

    automatic: bool = False

    def judge(self, value: Any) -> tuple[bool, str]:
        if self.automatic:
            return isinstance(value, bool) or value == "auto", "true, false or auto"
        return isinstance(value, bool), "true or false"


@dataclass(frozen=True)
class Rows(Setting):
    """Into how many parts a matrix is cut by rows, or the rows of each part, as a pattern."""

    def judge(self, value: Any) -> tuple[bool, str]:
        parts = value if isinstance(value, tuple | list) and value else [value]
        good = all(isinstance(each, int) and not isinstance(each, bool) for each in parts)
        return good and min(parts) >= 1, "a whole number of at least 1, or several: rows"


@dataclass(frozen=True)
class Choice(Setting):
    """One of several names."""

    names: tuple[str, ...] = ()

    def judge(self, value: Any) -> tuple[bool, str]:
        return value in self.names, f"one of {', '.join(self.names)}"


Declared = tuple[Setting, ...]  # the settings of a rule


def shown(value: Any) -> str:
    """Return a value as a line of a message can show it."""
    return " ".join(str(value).split())[:80]


LR = Number(
    "lr",
    "Peak learning rate. Other rates follow the schedule in proportion. The embeddings of "
    "mars-shampoo get 0.3 of it.",
)
BETAS = Betas("betas", "Decay of the momentum and of the second moment.")
EPS = Number("eps", "Added to the root of the second moment.", 1e-8, positive=True)
WEIGHT_DECAY = Number("weight_decay", "Decoupled weight decay.")
BETAS_1D = Betas(
    "betas_1d",
    "Betas of AdamW, for vectors and (mars-m, muon) embeddings and heads.",
    (0.9, 0.95),
    scope="optimizer",
)
LR_REST = Number(
    "lr_rest",
    "Learning rate of the AdamW of embeddings, heads and vectors. If not set, lr.",
    scope="optimizer",
    optional=True,
)
FLATTEN = Flag(
    "flatten", "See parameters of three dims as one matrix [out, -1].", False, scope="group"
)
SPLIT = Rows("split", "Parts that a matrix is cut into by rows.", 1, scope="group")
TRANSPOSED = Flag(
    "transposed",
    "Matrices are stored [in, out], not [out, in]: their columns are what is called rows.",
    False,
    scope="group",
)
ZERO_MEAN = Flag(
    "zero_mean",
    "Take the mean over rows out of a matrix and of its direction: of softmax routers, whose "
    "gradient has none except rounding.",
    False,
    scope="group",
)

PER_HEAD = Flag(
    "per_head",
    "Orthogonalise the rows of each head on their own, in the matrices whose heads the model "
    "declares: those of queries, keys and values. auto: where it declares some. A group's own "
    "rule changes nothing in this.",
    False,
    automatic=True,
)

# Of the rules that orthogonalise matrices.
ORTHOGONALIZE = Choice(
    "orthogonalize",
    "How matrices are orthogonalised. newton-schulz: five steps of one polynomial, as published. "
    "polar-express: five steps of different ones, nearer to orthogonal. deepseek-v4: ten steps, "
    "nearest. cubic5: five steps, a third fewer products.",
    "newton-schulz",
    names=("newton-schulz", "polar-express", "deepseek-v4", "cubic5"),
)
EQUILIBRATE = Flag(
    "equilibrate",
    "Give all rows of a matrix one norm before it is orthogonalised, and scale it to the norm that "
    "an orthogonal one has after it.",
    False,
)
MATRIX_SETTINGS = (
    FLATTEN,
    SPLIT,
    TRANSPOSED,
    PER_HEAD,
    ZERO_MEAN,
    ORTHOGONALIZE,
    EQUILIBRATE,
)

# How a parameter is seen as matrices.
CUT = ("flatten", "split", "transposed", "per_head")
# Settings of a group that plans and state follow from: they cannot change later.
FIXED = {"rule", *(each.name for each in MATRIX_SETTINGS)}

# Of the rules that reduce the variance of the gradient.
GAMMA = Number(
    "gamma",
    "Strength of the variance reduction. For mars-adamw 0.025 to 0.05 works best.",
    0.025,
)
GAMMA_NEXT = Number(
    "gamma_next", "gamma of the next step, where it has a schedule.", scope="group", optional=True
)
CLIP = Number(
    "clip",
    "Clip each tensor's corrected gradient to this norm. 0 switches it off; the rules other than "
    "mars-adamw then keep one buffer per parameter.",
    1.0,
    positive=True,
    optional=True,
)
# Of those among them that leave vectors to AdamW on settings of its own.
OPTIMIZE_1D = Flag(
    "optimize_1d",
    "Give vectors (norm weights, biases) MARS too, instead of AdamW.",
    False,
    scope="optimizer",
)
LR_1D = Number(
    "lr_1d",
    "Learning rate of the vectors' AdamW. If the rule has no default, half of lr.",
    scope="optimizer",
    optional=True,  # half of lr
)
WEIGHT_DECAY_1D = Number(
    "weight_decay_1d", "Weight decay of the vectors' AdamW.", 0.1, scope="optimizer"
)
MARS_SETTINGS = (
    EPS,
    GAMMA,
    GAMMA_NEXT,
    CLIP,
    OPTIMIZE_1D,
    BETAS_1D,
    WEIGHT_DECAY_1D,
)
