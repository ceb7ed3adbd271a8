"""Which update rule, with which settings for which parameters.

The settings of rules are those that the rules declare (`optim.rules`).
"""

from dataclasses import dataclass, field, fields
from functools import cache, partial
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, cast

from torchmars.config.fields import Amount, Clip, Mark, Positive, require, with_settings
from torchmars.core.bounds import KeyOf, Range, WordOrFlag
from torchmars.core.errors import UserError
from torchmars.optim.rules import RULES
from torchmars.optim.settings import Betas, Choice, Flag, Number, Setting

T = TypeVar("T")
Rule = Annotated[str, KeyOf(RULES)]
GROUPS = ("matrix", "router", "embedding", "head", "vector")


def fields_of_rules(*scopes: str) -> dict[str, tuple[Any, Any, str]]:
    """Return the fields that the rules' settings of `scopes` become: type, default and `--help`."""
    of_optimizer = "optimizer" in scopes
    more_than_0 = Annotated[float, Range(0, 1_000_000, open_low=True)]
    types = {"lr": more_than_0} if of_optimizer else {}  # a group's may be 0
    settings = {each.name: each for rule in RULES.values() for each in rule.settings}
    return {
        name: (
            types.get(name, value_type(each)) | None,
            None,
            setting_text(each, with_defaults=of_optimizer),
        )
        for name, each in settings.items()
        if each.scope in scopes
    }


def value_type(setting: Setting) -> Any:
    """Return the type of a setting in a config, where a clip of 0 is no clip."""
    types = {Number: Amount, Betas: tuple[float, float], Flag: bool}
    if isinstance(setting, Choice):
        return Literal[setting.names]
    if isinstance(setting, Flag) and setting.automatic:
        return Annotated[bool | Literal["auto"], WordOrFlag("auto")]
    off = isinstance(setting, Number) and setting.positive and setting.optional
    return Clip if off else types.get(type(setting), Any)


def setting_text(setting: Setting, with_defaults: bool) -> str:
    """Return a setting's `--help`: which rules have it, its meaning, its defaults."""
    having = [name for name, rule in RULES.items() if setting.name in rule.defaults]
    text = setting.meaning
    if len(having) < len(RULES):
        text = f"{listed(having)}: {text[:1].lower()}{text[1:]}"
    if not with_defaults:
        return text
    rules_of: dict[str, list[str]] = {}
    for name in having:
        rules_of.setdefault(shown_default(RULES[name].defaults[setting.name]), []).append(name)
    defaults = [
        value if len(rules_of) == 1 else f"{value} for {listed(names)}"
        for value, names in rules_of.items()
        if value  # else it is computed, as the meaning says
    ]
    return f"{text} Default: {'; '.join(defaults)}." if defaults else text


def listed(rules: list[str]) -> str:
    """Return names of rules, mars-* for those that reduce the variance if all are among them."""
    mars = [name for name, rule in RULES.items() if rule.variance_reduced]
    if set(mars) <= set(rules):
        rules = ["mars-*", *(name for name in rules if name not in mars)]
    return ", ".join(rules)


def shown_default(value: Any) -> str:
    """Return a default as the command line takes it, or nothing for one that is computed."""
    if isinstance(value, tuple):
        return " ".join(map(shown_default, value))
    if value is None or isinstance(value, str):
        return value or ""
    return str(value).lower() if isinstance(value, bool) else f"{value:g}"


@partial(with_settings, settings=fields_of_rules("both"))
@dataclass(frozen=True)
class GroupRule:
    """The rule of one group of parameters, and its settings."""

    rule: Rule | None = None
    """Update rule."""


@dataclass(frozen=True)
class GroupConfig(GroupRule):
    """Settings of one group of parameters, instead of the optimizer's.

    Settings that are not set follow from optimizer.name.
    """

    split: Positive | None = None
    """Matrix rules: parts that a matrix is cut into by rows before it is orthogonalised. 3 for a
    fused QKV."""


@dataclass(frozen=True)
class PatternConfig(GroupConfig):
    """A group of the parameters whose name matches a pattern."""

    pattern: str = ""
    """Pattern of parameter names, as a shell's: "blocks.*.attn.qkv.weight"."""


@partial(with_settings, settings=fields_of_rules("both", "optimizer"))
@dataclass(frozen=True)
class NamedRule:
    """A rule and its settings."""

    name: Annotated[Rule, Mark.IDENTITY] = "mars-adamw"
    """mars-adamw, mars-lion, mars-shampoo, mars-m: variance-reduced AdamW, Lion, Shampoo and Muon.
    adamw, lion, muon: the same without the reduction. A run prints at its start what embeddings
    and vectors get."""


@dataclass(frozen=True)
class OptimizerConfig(NamedRule):
    """Which update rule, with which settings.

    Defaults are the published ones for GPT-2 small, where there are any, but for `per_head`.
    """

    mode: Annotated[Literal["approx", "exact"], Mark.IDENTITY] = "approx"
    """mars-*: which gradient corrects. approx: the last step's. exact: this batch's at the last
    weights, which costs a second forward and backward pass."""
    momentum_dtype: Annotated[Literal["float32", "bfloat16"], Mark.IDENTITY] = "float32"
    """The dtype in which the momentum is kept, the first moment of every rule."""
    last_grad_dtype: Annotated[Literal["float32", "bfloat16"], Mark.IDENTITY] = "float32"
    """mars-*: the dtype in which the last gradient is kept."""
    matrix_dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Matrix rules: the dtype in which matrices are sent to their owners, and multiplied. auto:
    bfloat16 where every rank has instructions for it, else float32. A run keeps its first choice
    unless this names another."""
    matrix: GroupConfig = field(default_factory=GroupConfig)
    """Hidden matrices."""
    router: GroupConfig = field(default_factory=GroupConfig)
    """The matrices that choose experts. By default they get the defaults of hidden matrices."""
    embedding: GroupConfig = field(default_factory=GroupConfig)
    """Token and position embeddings."""
    head: GroupConfig = field(default_factory=GroupConfig)
    """An output layer of its own."""
    vector: GroupConfig = field(default_factory=GroupConfig)
    """Norm weights and biases."""
    groups: list[PatternConfig] = field(default_factory=list)
    """[[optimizer.groups]] tables: parameters by name. The first pattern that matches claims them.
    In TOML only."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:  # the settings of rules
            ...

    @property
    def passes(self) -> int:
        """The forward and backward passes over each batch: with exact mode's look-ahead."""
        return 2 if self.mode == "exact" else 1

    def settings(self) -> dict[str, Any]:
        """Return the arguments of `param_groups` but the model."""
        by_role = {role: set_fields(getattr(self, role)) for role in GROUPS}
        patterns = [set_fields(group) for group in self.groups]
        return self.rule_settings() | {
            "name": self.name,
            "by_role": {role: changes for role, changes in by_role.items() if changes},
            "by_pattern": [(changes.pop("pattern"), changes) for changes in patterns],
        }

    def rule_settings(self) -> dict[str, Any]:
        """Return the settings of the rule that are set."""
        known = {name for rule in RULES.values() for name in rule.defaults}
        return {key: value for key, value in set_fields(self).items() if key in known}

    def resolve(self) -> "ResolvedOptimizer":
        """Return the section with the rule's defaults filled in.

        Raises `UserError` for a value or a setting that the rule cannot take.
        """
        # Here, since it imports torch, which takes seconds.
        from torchmars.optim.groups import check_groups, complete_settings

        require(
            self.mode == "approx" or RULES[self.name].variance_reduced,
            f'optimizer.mode has no meaning for optimizer.name = "{self.name}"',
        )
        try:
            settings = complete_settings(self.name, **self.rule_settings())
            kind: type[ResolvedOptimizer] = with_plugins(ResolvedOptimizer)
            resolved = kind(**vars(self) | settings)
            check_groups(**resolved.settings())
        except ValueError as error:
            raise UserError(f"optimizer.{error}") from None
        return resolved


@dataclass(frozen=True, kw_only=True)
class ResolvedOptimizer(OptimizerConfig):
    """Which update rule, with the settings that every rule has.

    The others are None if the rule has none of the kind.
    """

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float


def with_plugins(kind: type[T]) -> type[T]:
    """Return the section `kind`, one of the optimizer's, with the settings of plugins' rules."""
    extended: type[T] = with_rules(cast(Any, kind), (*RULES.values(),))
    return extended


@cache
def with_rules(kind: Any, rules: tuple[Any, ...]) -> Any:
    """Return the section `kind` with the settings of `rules`, which are those of `RULES`."""
    known = {each.name for each in fields(kind)}
    more = {
        name: each
        for name, each in fields_of_rules("both", "optimizer").items()
        if name not in known
    }
    return with_settings(kind, more) if more else kind


def set_fields(section: GroupConfig | OptimizerConfig) -> dict[str, Any]:
    """Return the fields of a section that are not None."""
    values = {each.name: getattr(section, each.name) for each in fields(section)}
    return {name: value for name, value in values.items() if value is not None}
