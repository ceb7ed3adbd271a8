"""Which update rule, with which settings for which parameters.

The settings of rules are those that the rules declare (`optim.rules`).
"""

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from torchmars.config.fields import Amount, Clip, Mark, Positive, Was, require
from torchmars.core.bounds import KeyOf, Range
from torchmars.core.errors import UserError
from torchmars.optim.rules import RULES, variance_reduced
from torchmars.optim.settings import Betas, Choice, Flag, Number, Setting

Rule = Annotated[str, KeyOf(RULES)]
ROUTERS = "optimizer.zero_mean_routers"
GROUPS = ("matrix", "router", "embedding", "head", "vector")


def with_settings(*scopes: str) -> Callable[[type], type]:
    """Return a decorator: it adds the rules' settings of `scopes` to a class, as optional fields.

    They come after its first field.
    """

    def add(kind: type) -> type:
        settings = {each.name: each for rule in RULES.values() for each in rule.settings}
        settings = {name: each for name, each in settings.items() if each.scope in scopes}
        for name, setting in settings.items():
            text = setting_text(setting, with_defaults="optimizer" in scopes)
            setattr(kind, name, field(default=None, metadata={"help": text}))
        first, own = next(iter(kind.__annotations__)), kind.__annotations__
        types = {
            name: Annotated[value_type(setting) | None, Was(setting.was)]
            for name, setting in settings.items()
        }
        kind.__annotations__ = {first: own[first]} | types | own
        return kind

    return add


def value_type(setting: Setting) -> Any:
    """Return the type of a setting in a config, where a clip of 0 is no clip."""
    types = {Number: Amount, Betas: tuple[float, float], Flag: bool}
    if isinstance(setting, Choice):
        return Literal[setting.names]
    off = isinstance(setting, Number) and setting.positive and setting.optional
    return Clip if off else types[type(setting)]


def setting_text(setting: Setting, with_defaults: bool) -> str:
    """Return a setting's `--help`: which rules have it, its meaning, its defaults."""
    having = [name for name, rule in RULES.items() if setting.name in rule.defaults]
    text = setting.meaning
    if len(having) < len(RULES):
        text = f"{listed(having)}: {text[0].lower()}{text[1:]}"
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
    return f"{text} Default: {'; '.join(defaults)}."


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


@dataclass(frozen=True)
@with_settings("both")
class GroupConfig:
    """Settings of one group of parameters, instead of the optimizer's.

    Settings that are not set follow from optimizer.name.
    """

    rule: Rule | None = None
    """Update rule."""
    split: Positive | None = None
    """Matrix rules: parts that a matrix is cut into by rows before it is orthogonalised. 3 for a
    fused QKV."""


@dataclass(frozen=True)
class PatternConfig(GroupConfig):
    """A group of the parameters whose name matches a pattern."""

    pattern: str = ""
    """Pattern of parameter names, as a shell's: "blocks.*.attn.qkv.weight"."""


@dataclass(frozen=True)
@with_settings("both", "optimizer")
class OptimizerConfig:
    """Which update rule, with which settings.

    Defaults are the published ones for GPT-2 small, where there are any.
    """

    name: Annotated[Rule, Mark.IDENTITY] = "mars-adamw"
    """mars-adamw, mars-lion, mars-shampoo, mars-m: variance-reduced AdamW, Lion, Shampoo and Muon.
    adamw, lion, muon: the same without the reduction. A run prints at its start what embeddings
    and vectors get."""
    lr: Annotated[float, Range(0, 1_000_000, open_low=True)] | None = None  # a group's may be 0
    mode: Annotated[Literal["approx", "exact"], Mark.IDENTITY] = "approx"
    """mars-*: which gradient corrects. approx: the last step's. exact: this batch's at the last
    weights, which costs a second forward and backward pass."""
    momentum_dtype: Annotated[Literal["float32", "bfloat16"], Mark.IDENTITY] = "float32"
    """The dtype in which the momentum is kept, the first moment of every rule."""
    last_grad_dtype: Annotated[Literal["float32", "bfloat16"], Mark.IDENTITY] = "float32"
    """mars-*: the dtype in which the last gradient is kept."""
    matrix_dtype: Literal["auto", "bfloat16", "mixed", "float32"] = "auto"
    """Matrix rules: the dtype in which matrices are sent to their owners, and multiplied. mixed:
    they are multiplied in float32; input and direction are sent in bfloat16. auto: bfloat16 where
    every rank has instructions for it, else mixed. A run keeps its first choice unless this names
    another."""
    zero_mean_routers: bool | None = None
    """Matrix rules: take the mean over experts out of the momentum of softmax routers. Their
    gradient has none except rounding, of which orthogonalisation would make a step. By default
    new runs do unless training.router_z_loss is set, whose gradient has one. A run keeps what it
    began with unless this says otherwise."""
    overlap: bool = True
    """Matrix rules: let the transfers of matrices overlap with the work on others."""
    extra: dict[str, Any] = field(default_factory=dict)
    """[optimizer.extra]: settings that only a plugin's rule has, by the names that it declares:
    --optimizer.extra.NAME VALUE."""
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
        return {key: value for key, value in set_fields(self).items() if key in known} | self.extra

    def resolve(self) -> "ResolvedOptimizer":
        """Return the section with the rule's defaults filled in.

        Raises `UserError` for a value or a setting that the rule cannot take.
        """
        # Here, since it imports torch, which takes seconds.
        from torchmars.optim.groups import check_groups, complete_settings

        require(
            variance_reduced(self.name) or self.mode == "approx",
            f'optimizer.mode has no meaning for optimizer.name = "{self.name}"',
        )
        for key in self.extra:
            require(
                key not in OptimizerConfig.__dataclass_fields__,
                f"optimizer.extra.{key} is a setting of all rules: set optimizer.{key}",
            )
        try:
            settings = complete_settings(self.name, **self.rule_settings())
            own = {key: value for key, value in settings.items() if key not in vars(self)}
            known = {key: value for key, value in settings.items() if key in vars(self)}
            resolved = ResolvedOptimizer(**vars(self) | known | {"extra": own})
            check_groups(**resolved.settings())
        except ValueError as error:
            of_plugin = str(error).partition(" ")[0] in self.extra
            raise UserError(f"optimizer.{'extra.' if of_plugin else ''}{error}") from None
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


def set_fields(section: GroupConfig | OptimizerConfig) -> dict[str, Any]:
    """Return the fields of a section that are not None."""
    values = {each.name: getattr(section, each.name) for each in fields(section)}
    return {name: value for name, value in values.items() if value is not None}


def resolve_routers(
    section: ResolvedOptimizer, router_z_loss: float, saved: dict[str, Any] | None
) -> ResolvedOptimizer:
    """Return the section with `zero_mean_routers` resolved.

    Where the config names nothing, it stays as in `saved`, the config of the checkpoint that the
    run resumes from: None if it is older than the setting.
    """
    value = section.zero_mean_routers
    if value is None:
        value = True if saved is None else saved["optimizer"].get("zero_mean_routers")
        value = value and not router_z_loss
    return replace(section, zero_mean_routers=value)
