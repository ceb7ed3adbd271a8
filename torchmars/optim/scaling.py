"""Learning rates that hold at every width and depth: from the shapes of a model and of its base.

One condition gives all: weights and their updates map inputs of size 1 to outputs of size 1, at
every shape (Yang et al., arXiv 2310.17813). Three numbers of the forward pass, the multipliers, and
for each tensor the scale of its initial values, its lr, decay and eps follow from it.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import NamedTuple

from torch import Tensor, nn

from torchmars.optim.matrices.shapes import MatrixShape
from torchmars.optim.roles import WRAPPERS, cut_of, heads_of, roles
from torchmars.optim.rules import RULES
from torchmars.optim.settings import CUT, Choice, Settings

# The power of the number of blocks, over the base's, that divides what each block adds.
DEPTHS = {"none": 0.0, "1/sqrt(L)": 0.5, "1/L": 1.0}
NUMBER = re.compile(r"\d+")
MATRICES = ("matrix", "router", "convolution")  # the roles whose sizes depend on their inputs
# Attributes of attention that have the width of its heads: here, and in transformers.
HEAD_WIDTHS = ("head_width", "head_dim", "head_size", "attention_head_size")


class Parameter(NamedTuple):
    """A trained parameter of a model."""

    role: str
    shape: tuple[int, ...]
    cut: Settings  # of `roles.cut_of`
    heads: Settings  # of `roles.heads_of`


class Twin(NamedTuple):
    """A parameter and its counterpart in the base."""

    own: Parameter
    name: str  # the counterpart's
    base: Parameter

    @property
    def width(self) -> float:
        """How many times as long as in the base the last dim is."""
        return self.own.shape[-1] / self.base.shape[-1] if self.own.shape else 1.0

    def pieces(self, given: Settings, cut: Settings) -> list[tuple[tuple[int, int], ...]]:
        """Return the sides [out, in] of each matrix in it, here and in the base.

        Both are cut as `given`, and else each by its own: here that is `cut`. Models may differ in
        how many heads they have: of heads of one shape there is one.
        """
        theirs = {name: self.base.cut.get(name, value) for name, value in cut.items()}
        if by_head := cut.get("per_head", False):
            theirs |= self.base.heads
        sides = _sides(self.own.shape, given | cut), _sides(self.base.shape, given | theirs)
        if by_head:
            return [*dict.fromkeys(zip(sides[0], cycle(sides[1])))]
        return list(zip(*sides, strict=True))


@dataclass(frozen=True)
class TransferFactors:
    """How a model differs from its base: see `transfer_factors`."""

    multipliers: dict[str, float]
    """What the model multiplies in its forward pass: "logits", "residual" (all that an attention,
    an MLP or a mixture adds to the residual stream), and "attention" (its logits, beside one over
    the root of a head's width)."""
    std: dict[str, float]
    """The factor of the standard deviation of each parameter's initial values, by name."""
    twins: dict[str, Twin]  # the parameters, by name
    blocks: str
    """What the names of all blocks' parameters begin with."""
    layers: float
    """How many times as many blocks as in the base there are."""
    depth: float  # one of the values of `DEPTHS`
    decay: str

    def of(
        self, name: str, parameter: Tensor, role: str, settings: Settings, cut: Settings
    ) -> Settings:
        """Return a group's `settings`, which are those of the base, for a parameter of `role`.

        `cut` says of it what the settings do not: see `roles.cut_of`. Raises `ValueError`.
        """
        twin, rule = self.twins.get(plain(name)), RULES[settings["rule"]]
        if twin is None or twin.own.shape != tuple(parameter.shape):
            raise ValueError(
                f"factors know no parameter {name!r} of the shape {list(parameter.shape)}: make "
                "them of this model"
            )
        lr, eps = 1.0, 1 / twin.width
        if role in MATRICES:
            pieces = twin.pieces({key: settings[key] for key in CUT if key in settings}, cut)
            lr = min(rule.lr_factor(*each) for each in pieces)
            (_, inputs), (_, of_base) = pieces[0]
            eps = of_base / inputs
        if self.depth and plain(name).startswith(self.blocks):
            lr *= self.layers ** (self.depth - 1)
            eps *= self.layers**-self.depth
        factors = {"lr": lr}
        if self.decay == "kept":
            factors["weight_decay"] = 1 / lr
        if "exp_avg_sq" in rule.buffers(None, False, False):
            factors["eps"] = eps
        changed = [key for key in factors if factors[key] != 1 and key in settings]
        return settings | {key: settings[key] * factors[key] for key in changed}


def transfer_factors(
    model: nn.Module,
    base: nn.Module,
    *,
    depth: str = "none",
    decay: str = "kept",
    applied: Sequence[str] | None = None,
) -> TransferFactors:
    """Return what lets `model` take the learning rates that were tuned on `base`.

    `param_groups(model, ..., factors=...)` takes it. The model must apply the `multipliers` too,
    and begin with values whose standard deviation is the base's times `std`. Both models may be on
    the meta device. All factors are 1 where both have the same shape.

    Args:
        model: the model to train.
        base: a smaller model of the same kind, whose parameters have the same names but for
            numbers.
        depth: "none", "1/L" or "1/sqrt(L)": the multiplier "residual", where L is how many times
            as many blocks as the base has.
        decay: "kept" raises weight decay where lr falls, so that their product stays; "coupled"
            leaves it.
        applied: the multipliers that the model applies, by name. None: those that its attribute
            `multipliers` names.

    Raises `ValueError` for a model that does not apply a multiplier that is not 1, for a parameter
    that the base has not, or with another number of dims, and for a `depth` of a model without
    blocks.
    """
    _check(model, depth, decay)
    blocks, count = _blocks(model)
    layers = max(count, 1) / max(_blocks(base)[1], 1)
    ours, theirs = _parameters(model), _parameters(base)
    twins = {name: _twin(name, own, theirs) for name, own in ours.items()}
    std = {}
    for name, twin in twins.items():
        if twin.own.role in MATRICES:
            (_, inputs), (_, of_base) = twin.pieces({}, twin.own.cut)[0]
            std[name] = (of_base / inputs) ** 0.5
    last = [each for each in twins.values() if each.own.role == "head"]
    last += [each for each in twins.values() if each.own.role == "embedding"]  # a tied head
    multipliers = {
        "logits": 1 / last[0].width if last else 1.0,
        "residual": layers ** -DEPTHS[depth],
        "attention": (_head_width(model) / _head_width(base)) ** -0.5,
    }
    known = getattr(model, "multipliers", ()) if applied is None else applied
    for name, value in multipliers.items():
        if value != 1 and name not in known:
            raise ValueError(
                f"{type(model).__name__} does not say that it applies the multiplier {name!r}, "
                f"here {value:g}: let it, and name it in its attribute multipliers"
            )
    return TransferFactors(multipliers, std, twins, blocks, layers, DEPTHS[depth], decay)


def _check(model: nn.Module, depth: str, decay: str) -> None:
    """Raise `ValueError` for what `transfer_factors` cannot take."""
    Choice("depth", "", names=(*DEPTHS,)).check(depth)
    Choice("decay", "", names=("kept", "coupled")).check(decay)
    if depth != "none" and not _blocks(model)[1]:
        raise ValueError(
            f'depth = "{depth}" has no meaning: {type(model).__name__} has no module of numbered '
            'blocks, such as nn.ModuleList: leave it "none"'
        )


def plain(name: str) -> str:
    """Return the name of a parameter without those of modules that wrap others."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def _parameters(model: nn.Module) -> dict[str, Parameter]:
    """Return the trained parameters of a model, by their plain names."""
    named, modules = dict(model.named_parameters()), dict(model.named_modules())
    found = {}
    for name, role in roles(model).items():
        cut = cut_of(name, named[name], modules) if named[name].ndim > 1 else {}
        if role == "convolution":
            cut = {"flatten": True} | cut
        shape = tuple(named[name].shape)
        found[plain(name)] = Parameter(role, shape, cut, heads_of(name, modules))
    return found


def _twin(name: str, own: Parameter, theirs: Mapping[str, Parameter]) -> Twin:
    """Return a parameter with its counterpart among those of the base. Raises `ValueError`."""
    pattern = NUMBER.sub("*", name)
    alike = (each for each in theirs if NUMBER.sub("*", each) == pattern)
    other = name if name in theirs else next(alike, None)
    if other is None:
        raise ValueError(f"the base has no {name}: it must be a model of the same kind")
    if len(own.shape) != len(theirs[other].shape):
        dims = len(own.shape), len(theirs[other].shape)
        raise ValueError(f"{name} has {dims[0]} dims, but {dims[1]} in the base")
    return Twin(own, other, theirs[other])


def _sides(shape: tuple[int, ...], cut: Settings) -> list[tuple[int, int]]:
    """Return the sides [out, in] of each matrix in a parameter."""
    matrix = MatrixShape(shape, **cut)
    rows, inputs = matrix.sides
    turns = rows // sum(matrix.parts)
    return [(turns * part, inputs) for part in matrix.parts]


def _blocks(model: nn.Module) -> tuple[str, int]:
    """Return what the names of all blocks' parameters begin with, and how many blocks there are.

    Blocks are the numbered members of a module: of the one with most parameters. 0: there are none.
    """
    found = [
        (sum(each.numel() for each in module.parameters()), f"{plain(path)}.".lstrip("."), count)
        for path, module in model.named_modules()
        if (count := len(names := [name for name, _ in module.named_children()]))
        if all(name.isdecimal() for name in names)
    ]
    _, prefix, count = max(found, default=(0, "\n", 0), key=lambda each: each[0])
    return prefix, count


def _head_width(model: nn.Module) -> int:
    """Return the width of an attention's head, 1 where no module says it."""
    values = (getattr(each, name, None) for each in model.modules() for name in HEAD_WIDTHS)
    return next((value for value in values if isinstance(value, int)), 1)
