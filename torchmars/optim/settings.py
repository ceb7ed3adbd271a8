"""The settings of rules: dataclasses whose fields have a type, a default and a meaning each.

A rule names the dataclass of its settings. What follows from it: which settings a parameter group
may have, the checks, the defaults of `MARS`, the section of the config and its `--help`. A field's
`Setting` stands beside its type, as `float`. Needs no torch.
"""

import math
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

Settings = dict[str, Any]  # of an optimizer by its name, or of a parameter group


@dataclass(frozen=True)
class Setting:
    """What a value of a setting must be."""

    name: str = ""
    default: Any = None
    scope: Literal["both", "optimizer", "group"] = "both"
    """Who has it: each parameter group, or the optimizer whose groups follow from it, or both."""

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


# What a field of a plain type must be; other fields have their `Setting` beside the type.
OF_TYPES: dict[Any, Setting] = {float: Number(), bool: Flag(), tuple[float, float]: Betas()}


@cache
def declared(kind: type) -> Declared:
    """Return the settings that a dataclass has, with their names and defaults."""
    hints = get_type_hints(kind, include_extras=True)
    found = ((each, hints[each.name]) for each in fields(kind))
    return tuple(
        replace(
            hint.__metadata__[0] if get_origin(hint) is Annotated else OF_TYPES[hint],
            name=each.name,
            default=each.default,
        )
        for each, hint in found
    )


def shown(value: Any) -> str:
    """Return a value as a line of a message can show it."""
    return " ".join(str(value).split())[:80]


@dataclass(frozen=True)
class RuleSettings:
    """The settings that every rule has. The class of a rule's settings derives from this one."""

    lr: float = 1e-3
    """Peak learning rate. Other rates follow the schedule in proportion."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the momentum and of the second moment."""
    eps: Annotated[float, Number(positive=True)] = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.1
    """Decoupled weight decay."""


@dataclass(frozen=True)
class Corrected(RuleSettings):
    """Those of rules that reduce the variance of the gradient."""

    gamma: float = 0.025
    """Strength of the variance reduction. For mars-adamw 0.025 to 0.05 works best."""
    clip: Annotated[float | None, Number(positive=True, optional=True)] = 1.0
    """Clip each tensor's corrected gradient to this norm. 0 switches it off; the rules other than
    mars-adamw then keep one buffer per parameter."""


@dataclass(frozen=True)
class OfVectors(Corrected):
    """Those of rules that leave vectors to AdamW on settings of its own."""

    optimize_1d: Annotated[bool, Flag(scope="optimizer")] = False
    """Give vectors (norm weights, biases) MARS too, instead of AdamW."""
    lr_1d: Annotated[float | None, Number(scope="optimizer", optional=True)] = None
    """Learning rate of the vectors' AdamW. If the rule has no default, half of lr."""
    betas_1d: Annotated[tuple[float, float], Betas(scope="optimizer")] = (0.9, 0.95)
    """Betas of AdamW, for vectors and (mars-m, muon) embeddings and heads."""
    weight_decay_1d: Annotated[float, Number(scope="optimizer")] = 0.1
    """Weight decay of the vectors' AdamW."""


Method = Literal["newton-schulz", "polar-express", "deepseek-v4", "cubic5"]


@dataclass(frozen=True)
class OfMatrices(RuleSettings):
    """Those of rules that orthogonalise matrices."""

    per_head: Annotated[bool | Literal["auto"], Flag(automatic=True)] = False
    """Orthogonalise the rows of each head on their own, in the matrices whose heads the model
    declares: those of queries, keys and values. auto: where it declares some. A group's own rule
    changes nothing in this."""
    orthogonalize: Annotated[Method, Choice(names=get_args(Method))] = "newton-schulz"
    """How matrices are orthogonalised. newton-schulz: five steps of one polynomial, as published.
    polar-express: five steps of different ones, nearer to orthogonal. deepseek-v4: ten steps,
    nearest. cubic5: five steps, a third fewer products."""
    equilibrate: bool = False
    """Give all rows of a matrix one norm before it is orthogonalised, and scale it to the norm that
    an orthogonal one has after it."""


@dataclass(frozen=True)
class MuonSettings(OfMatrices):
    """Those of Muon, which leaves all else to AdamW."""

    lr: float = 6e-3
    betas: tuple[float, float] = (0.95, 0.99)
    betas_1d: Annotated[tuple[float, float], Betas(scope="optimizer")] = (0.9, 0.95)
    """Betas of the AdamW of embeddings, heads and vectors."""
    lr_rest: Annotated[float | None, Number(scope="optimizer", optional=True)] = None
    """Learning rate of the AdamW of embeddings, heads and vectors. If not set, lr."""
    # Heads apart lowered the loss under muon and mars-m: docs/comparing.md#heads-apart.
    per_head: Annotated[bool | Literal["auto"], Flag(automatic=True)] = "auto"


# Of a group alone: how a parameter is seen as matrices, and what a schedule gives it.
FLATTEN = Flag("flatten", False, "group")  # parameters of three dims are one matrix [out, -1]
SPLIT = Rows("split", 1, "group")  # the parts that a matrix is cut into by rows
TRANSPOSED = Flag("transposed", False, "group")  # stored [in, out]: its columns are called rows
# The mean over rows is taken out of a matrix and of its direction: of softmax routers, whose
# gradient has none except rounding.
ZERO_MEAN = Flag("zero_mean", False, "group")
GAMMA_NEXT = Number("gamma_next", None, "group", optional=True)  # gamma of the next step
OF_MATRIX_GROUPS = (FLATTEN, SPLIT, TRANSPOSED, ZERO_MEAN)

# How a parameter is cut into matrices.
CUT = ("flatten", "split", "transposed", "per_head")
# Settings of a group that plans and state follow from: they cannot change later.
FIXED = {"rule", *CUT, "zero_mean", "orthogonalize", "equilibrate"}
