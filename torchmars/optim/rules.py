"""The update rules: what each of them computes for one tensor.

First what a rule is and the numbers that it is given, then the seven rules, then who takes which
of them. Sources: Yuan et al., "MARS", arXiv 2411.10438; Liu et al., "MARS-M", arXiv 2510.21800.

Names: x weight, g gradient after the global clip, h last gradient, c corrected gradient, m and v
the moments of c, b1 and b2 the betas, t the number of the step. O(m) is m orthogonalised. Each
tensor is flat.

No torch is imported here, so that the config can read the settings that rules declare. The
arithmetic uses the methods of the tensors that it is given.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple

from torchmars.optim.settings import (
    GAMMA_NEXT,
    OF_MATRIX_GROUPS,
    Corrected,
    Declared,
    MuonSettings,
    Number,
    OfMatrices,
    OfVectors,
    RuleSettings,
    Setting,
    Settings,
    declared,
)

if TYPE_CHECKING:
    from torch import Tensor

Buffers = tuple["Tensor", ...]  # of one tensor: those that `Rule.buffers` names, but "last_grad"


class Factors(NamedTuple):
    """The numbers of an update: tensors in the dtype of its computation, at least float32.

    Each is 0-d. Only of a whole group the last five of them are [n], one for each tensor.
    """

    applied: Tensor
    """Whether the step is applied, a bool: the condition of each write."""
    scale: Tensor
    """The factor of the global clip."""
    lr: Tensor
    weight_decay: Tensor
    eps: Tensor
    beta1: Tensor
    rate1: Tensor
    """1 - b1, as `rate2` is 1 - b2."""
    beta2: Tensor
    rate2: Tensor
    gamma_next: Tensor
    """gamma of the next step."""
    own: dict[str, Tensor]
    """The numbers that the rule itself declares (`Rule.own`), by name."""
    corrects: bool
    """Whether a last gradient is kept."""
    keeps: bool
    """Whether the update makes g the last gradient."""
    stacks: bool
    """Whether the tensors are stacks of matrices: experts."""
    kappa: Tensor
    """gamma b1 / (1 - b1): the strength of the correction. 0 at a first step."""
    clip: Tensor
    """min(1, clip / ||c||)."""
    unusable: Tensor
    """Whether h is not finite, a bool. kappa is 0 then."""
    unbias1: Tensor
    """1 / (1 - b1^t), as `unbias2` is 1 / (1 - b2^t)."""
    unbias2: Tensor

    def split(self, counts: Sequence[int]) -> list[Factors]:
        """Return the factors of a group's first tensors, the next ones, ...: `counts` of them."""
        shared, columns = self[:-5], (column.split(counts) for column in self[-5:])
        return [Factors(*shared, *column) for column in zip(*columns)]

    def of_each(self) -> list[Factors]:
        """Return the factors of each tensor of a group."""
        shared, columns = self[:-5], (column.unbind() for column in self[-5:])
        return [Factors(*shared, *column) for column in zip(*columns)]


def corrected(g: Tensor, h: Tensor, f: Factors) -> Tensor:
    """Return the clipped corrected gradient (arXiv 2411.10438, equation 4.2).

    c = g + kappa (g - h);   c <- c min(1, clip / ||c||)

    In a stack h is taken as 0 where g is exactly 0: an expert that got no token gets no correction,
    which would only undo a part of its last gradient.
    """
    h = g.where(f.unusable, h.to(g.dtype))
    if f.stacks:
        h = g.where(g == 0, h)
    return (g + f.kappa * (g - h)) * f.clip


class Rule(ABC):
    """An update rule: its settings, its buffers, and two functions of one tensor.

    To add one, derive from `ElementwiseRule` or `MatrixRule`, and register it in `RULES`.
    Rules have no state of their own.
    """

    name: ClassVar[str]
    config: ClassVar[type]
    """The dataclass of its settings. Its defaults are published ones for GPT-2 small, if any."""
    own: ClassVar[Sequence[str]] = ()
    """Those of them that are numbers and that no other rule has: they arrive in `Factors.own`."""
    variance_reduced: ClassVar[bool] = False
    """Whether it uses the corrected gradient of MARS. It then has the settings gamma and clip."""
    continues: ClassVar[Sequence[str]] = ()
    """Other rules whose saved state this one can continue from."""

    @abstractmethod
    def buffers(self, clip: float | None, exact: bool, stacks: bool) -> tuple[str, ...]:
        """Return the names of the state tensors that are as large as the parameter.

        The first is the momentum, and "last_grad" comes last. "exp_avg", "exp_avg_sq" (the second
        moment) and "last_grad" mean the same under every rule that has them. "momentum" means
        something else under each, and is only read by the rule that wrote it. `stacks` says whether
        the parameter is a stack of matrices.
        """

    @abstractmethod
    def momentum(self, old: Buffers, c: Tensor, f: Factors) -> Buffers:
        """Return the new buffers, made of the `old` ones and of c, or g where h is not kept."""

    def settings_by_role(self, main: Settings, settings: Settings) -> dict[str, Settings]:
        """Return the group settings of those roles whose settings are not `main`.

        `settings` are those of the optimizer, as `groups.complete_settings` returns them.
        """
        if "optimize_1d" in settings:
            return mars_settings_by_role(main, settings)
        return {"vector": main | {"weight_decay": 0.0}}

    @abstractmethod
    def lr_factor(self, sides: tuple[int, int], base: tuple[int, int]) -> float:
        """Return what the lr of a matrix with `sides` [out, in] is of the lr that suits `base`.

        A step changes outputs alike at both if its largest singular value goes with the root of
        out / in (Yang et al., arXiv 2310.17813).
        """

    @property
    def settings(self) -> Declared:
        """Its settings, and those that only its groups have."""
        of_groups = OF_MATRIX_GROUPS if isinstance(self, MatrixRule) else ()
        return *declared(self.config), *of_groups, *[GAMMA_NEXT] * self.variance_reduced

    @property
    def defaults(self) -> dict[str, Any]:
        """The default of each setting, by name."""
        return {setting.name: setting.default for setting in self.settings}


class ElementwiseRule(Rule):
    """A rule that updates each element on its own: x <- x - lr (direction + weight_decay x)."""

    @abstractmethod
    def direction(self, old: Buffers, new: Buffers, c: Tensor, f: Factors) -> Tensor:
        """Return the direction, of the buffers before and after `momentum`."""

    def lr_factor(self, sides: tuple[int, int], base: tuple[int, int]) -> float:
        # All elements move by about lr: a matrix of few directions, of norm lr (out in)^(1/2).
        return base[1] / sides[1]


class MatrixRule(Rule):
    """A rule that orthogonalises: x <- x - lr (scale O(direction) + weight_decay x)."""

    @abstractmethod
    def direction(self, new: Buffers, g: Tensor, f: Factors) -> Tensor:
        """Return the matrix to orthogonalise, of the buffers after `momentum`.

        It is asked for a part of each tensor.
        """

    @abstractmethod
    def scale(self, rows: int, cols: int) -> float:
        """Return the factor of an orthogonalised [rows, cols] matrix."""

    def lr_factor(self, sides: tuple[int, int], base: tuple[int, int]) -> float:
        (rows, cols), (base_rows, base_cols) = sides, base
        grows = (rows / base_rows) / (cols / base_cols)
        return grows**0.5 * self.scale(*base) / self.scale(*sides)


@dataclass(frozen=True)
class AdamWSettings(RuleSettings):
    """Those of AdamW."""

    lr: float = 6e-4


class AdamW(ElementwiseRule):
    """AdamW (Loshchilov & Hutter, arXiv 1711.05101).

    m = b1 m + (1 - b1) g;   v = b2 v + (1 - b2) g^2
    direction = (m / (1 - b1^t)) / ((v / (1 - b2^t))^(1/2) + eps)
    """

    name = "adamw"
    config: ClassVar[type] = AdamWSettings

    def buffers(self, clip: float | None, exact: bool, stacks: bool) -> tuple[str, ...]:
        return "exp_avg", "exp_avg_sq"

    def momentum(self, old: Buffers, c: Tensor, f: Factors) -> Buffers:
        m, v = old
        return m + f.rate1 * (c - m), v + f.rate2 * (c * c - v)

    def direction(self, old: Buffers, new: Buffers, c: Tensor, f: Factors) -> Tensor:
        m, v = new
        return m * f.unbias1 / ((v * f.unbias2).sqrt() + f.eps)


@dataclass(frozen=True)
class MarsAdamWSettings(OfVectors):
    """Those of MARS-AdamW."""

    lr: float = 6e-3
    betas: tuple[float, float] = (0.95, 0.99)
    weight_decay: float = 0.01


class MarsAdamW(AdamW):
    """MARS-AdamW (arXiv 2411.10438): both moments are of c, also without a clip."""

    name = "mars-adamw"
    config: ClassVar[type] = MarsAdamWSettings
    variance_reduced = True
    continues = ("adamw",)

    def buffers(self, clip: float | None, exact: bool, stacks: bool) -> tuple[str, ...]:
        return "exp_avg", "exp_avg_sq", "last_grad"


@dataclass(frozen=True)
class LionSettings(RuleSettings):
    """Those of Lion."""

    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.5


class Lion(ElementwiseRule):
    """Lion (Chen et al., arXiv 2302.06675, algorithm 2).

    direction = sign(b1 m + (1 - b1) g), of the old m;   m = b2 m + (1 - b2) g
    """

    name = "lion"
    config: ClassVar[type] = LionSettings

    def buffers(self, clip: float | None, exact: bool, stacks: bool) -> tuple[str, ...]:
        return ("exp_avg",)

    def momentum(self, old: Buffers, c: Tensor, f: Factors) -> Buffers:
        (m,) = old
        return (f.beta2 * m + f.rate2 * c,)

    def direction(self, old: Buffers, new: Buffers, c: Tensor, f: Factors) -> Tensor:
        (m,) = old
        return (f.beta1 * m + f.rate1 * c).sign()


class MarsMomentum(Rule):
    """A rule that steps by the momentum of c alone: m = b1 m + (1 - b1) c.

    Where nothing is clipped tensor by tensor, one buffer is enough, since the last gradient drops
    out: m_t = b1 m_{t-1} + (1 - b1) g_t + gamma_t b1 (g_t - g_{t-1}), and with
    u_t = m_t - gamma_{t+1} g_t

    u_t = b1 u_{t-1} + ((1 - b1) (1 + kappa_t) - gamma_{t+1}) g_t;   m_t = u_t + gamma_{t+1} g_t

    A stack keeps both buffers, since its h is not always the last gradient: see `corrected`.
    """

    variance_reduced = True

    def buffers(self, clip: float | None, exact: bool, stacks: bool) -> tuple[str, ...]:
        lean = clip is None and not exact and not stacks
        return ("momentum",) if lean else ("exp_avg", "last_grad")

    def momentum(self, old: Buffers, c: Tensor, f: Factors) -> Buffers:
        (m,) = old
        if f.corrects:
            return (m + f.rate1 * (c - m),)
        return (f.beta1 * m + (f.rate1 * (1 + f.kappa) - f.gamma_next) * c,)


@dataclass(frozen=True)
class MarsLionSettings(OfVectors):
    """Those of MARS-Lion."""

    lr: float = 6e-4
    betas: tuple[float, float] = (0.95, 0.99)


class MarsLion(MarsMomentum, ElementwiseRule):
    """MARS-Lion (arXiv 2411.10438): direction = sign(m)."""

    name = "mars-lion"
    config: ClassVar[type] = MarsLionSettings

    def direction(self, old: Buffers, new: Buffers, c: Tensor, f: Factors) -> Tensor:
        (m,) = new
        return (m if f.corrects else m + f.gamma_next * c).sign()


class Muon(MatrixRule):
    """Muon with Nesterov momentum in Moonlight's form (Liu et al., arXiv 2502.16982).

    B = b1 B + g;   direction = (1 - b1) (g + b1 B), which is of the gradient's size
    """

    name = "muon"
    config: ClassVar[type] = MuonSettings

    def buffers(self, clip: float | None, exact: bool, stacks: bool) -> tuple[str, ...]:
        return ("momentum_buffer",)

    def momentum(self, old: Buffers, c: Tensor, f: Factors) -> Buffers:
        (b,) = old
        return (f.beta1 * b + c,)

    def direction(self, new: Buffers, g: Tensor, f: Factors) -> Tensor:
        (b,) = new
        return f.rate1 * (f.beta1 * b + g)

    def scale(self, rows: int, cols: int) -> float:
        return 0.2 * max(rows, cols) ** 0.5  # a step is as large as AdamW's

    def settings_by_role(self, main: Settings, settings: Settings) -> dict[str, Settings]:
        rest = settings.get("lr_rest")
        lr = settings["lr"] if rest is None else rest
        adamw = adamw_settings(settings, lr, settings["weight_decay"])
        return dict.fromkeys(("embedding", "head", "vector"), adamw)


@dataclass(frozen=True)
class MarsMSettings(MuonSettings, Corrected):
    """Those of MARS-M."""


class MarsM(MarsMomentum, Muon):
    """MARS-M (Liu et al., arXiv 2510.21800): Muon by the corrected momentum. direction = m."""

    name = "mars-m"
    config: ClassVar[type] = MarsMSettings

    def direction(self, new: Buffers, g: Tensor, f: Factors) -> Tensor:
        (m,) = new
        return m if f.corrects else m + f.gamma_next * g


@dataclass(frozen=True)
class MarsShampooSettings(OfVectors, OfMatrices):
    """Those of MARS-Shampoo. Under it heads apart were not tried."""

    lr: float = 2e-2
    """Peak learning rate. Other rates follow the schedule in proportion. Embeddings get 0.3 of it.
    """
    betas: tuple[float, float] = (0.95, 0.99)
    weight_decay: float = 0.01
    lr_1d: Annotated[float | None, Number(scope="optimizer", optional=True)] = 3e-3


class MarsShampoo(MarsM):
    """MARS-Shampoo (arXiv 2411.10438), with the scale of the published code."""

    name = "mars-shampoo"
    config: ClassVar[type] = MarsShampooSettings
    # Of the matrices' lr: an orthogonal matrix moves its entries less than AdamW does.
    EMBEDDING_LR = 0.3

    def scale(self, rows: int, cols: int) -> float:
        return max(1.0, rows / cols) ** 0.5

    def settings_by_role(self, main: Settings, settings: Settings) -> dict[str, Settings]:
        outer = main | {"rule": "mars-adamw", "lr": settings["lr"] * self.EMBEDDING_LR}
        return mars_settings_by_role(outer, settings)


def mars_settings_by_role(outer: Settings, settings: Settings) -> dict[str, Settings]:
    """Return the settings of embeddings and heads, which take `outer`, and of vectors.

    Embeddings have no weight decay. Vectors take AdamW, or with `optimize_1d` what heads take.
    """
    vector = adamw_settings(settings, settings["lr_1d"], settings["weight_decay_1d"])
    return {
        "embedding": outer | {"weight_decay": 0.0},
        "head": outer,
        "vector": outer if settings["optimize_1d"] else vector,
    }


def adamw_settings(settings: Settings, lr: float, weight_decay: float) -> Settings:
    """Return a group's settings under plain AdamW; the others are the optimizer's `settings`."""
    others = {"betas": settings["betas_1d"], "eps": settings["eps"]}
    return {"rule": "adamw", "lr": lr, "weight_decay": weight_decay} | others


RULES: dict[str, Rule] = {
    rule.name: rule
    for rule in (MarsAdamW(), MarsLion(), MarsShampoo(), MarsM(), AdamW(), Lion(), Muon())
}


def group_settings() -> dict[str, Setting]:
    """Return the settings that a parameter group of any rule may have, by name."""
    every = [setting for rule in RULES.values() for setting in rule.settings]
    return {setting.name: setting for setting in every if setting.scope != "optimizer"}


def state_fits(rule: str, wanted: Iterable[str], saved_rule: str, saved: Iterable[str]) -> bool:
    """Return whether `rule` can continue from state of the names `saved` that `saved_rule` left.

    Moving averages mean the same under every rule that keeps them. "momentum" fits its own rule
    only. A last gradient may be missing: the first correction is then left out.
    """
    missing = set(wanted) - set(saved)
    return missing <= {"last_grad"} and ("momentum" not in wanted or rule == saved_rule)
