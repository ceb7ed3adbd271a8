"""Which update rule, with which settings for which parameters.

A rule names the dataclass of its own settings (`optim.rules`). [optimizer] has those of the rule
that it names, beside what all rules have.
"""

from dataclasses import dataclass, field, fields, make_dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Literal

from torchmars.config.fields import Amount, Clip, Mark, Positive, remade, require
from torchmars.core.check import Interval, KeyOf
from torchmars.core.errors import UserError
from torchmars.optim.rules import RULES
from torchmars.optim.settings import Method

Rule = Annotated[str, KeyOf(RULES)]
GROUPS = ("matrix", "router", "embedding", "head", "vector")
Beta = Annotated[float, Interval(ge=0, lt=1)]


@dataclass(frozen=True)
class GroupConfig:
    """Settings of matrix, router, embedding, head or vector parameters, if not [optimizer]'s."""

    rule: Rule | None = None
    """Update rule."""
    lr: Amount | None = None
    """Peak learning rate."""
    betas: tuple[Beta, Beta] | None = None
    """Decay of the momentum and of the second moment."""
    weight_decay: Amount | None = None
    """Decoupled weight decay."""
    eps: Amount | None = None
    """Added to the root of the second moment."""
    gamma: Amount | None = None
    """mars-*: strength of the variance reduction."""
    clip: Clip | None = None
    """mars-*: clip each tensor's corrected gradient to this norm. 0 switches it off."""
    per_head: bool | Literal["auto"] | None = None
    """Matrix rules: orthogonalise the rows of each head on their own."""
    orthogonalize: Method | None = None
    """Matrix rules: how matrices are orthogonalised."""
    equilibrate: bool | None = None
    """Matrix rules: give all rows of a matrix one norm first."""
    split: Positive | None = None
    """Matrix rules: parts that a matrix is cut into by rows before it is orthogonalised. 3 for a
    fused QKV."""


@dataclass(frozen=True)
class PatternConfig(GroupConfig):
    """[[optimizer.groups]], in TOML only: parameters whose name matches a pattern."""

    pattern: str = ""
    """Pattern of parameter names, as a shell's: "blocks.*.attn.qkv.weight"."""


@dataclass(frozen=True)
class OptimizerConfig:
    """Which update rule, with which settings.

    Defaults are the published ones for GPT-2 small, where there are any, but for `per_head`.
    """

    name: Annotated[Rule, Mark.IDENTITY] = "mars-adamw"
    """mars-adamw, mars-lion, mars-shampoo, mars-m: variance-reduced AdamW, Lion, Shampoo and Muon.
    adamw, lion, muon: the same without the reduction. A run prints at its start what embeddings
    and vectors get. Its settings: --help optimizer --optimizer.name NAME."""
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
        own = {each.name for each in fields(RULES[self.name].config)}
        return {key: value for key, value in set_fields(self).items() if key in own}

    def warning(self) -> str:
        """Return in a line that the rate is far above the rule's default; else nothing."""
        usual = RULES[self.name].defaults["lr"]
        return (
            f"optimizer.lr = {self.lr:g} is {self.lr / usual:,.0f} times the default of "
            f"{self.name}, {usual:g}"
            if self.lr > 100 * usual
            else ""
        )

    def resolve(self) -> "OptimizerConfig":
        """Return the section with what follows from others filled in.

        Raises `UserError` for a value or a setting that the rule cannot take.
        """
        # Here, since it imports torch, which takes seconds.
        from torchmars.optim.groups import check_groups, complete_settings

        require(
            self.mode == "approx" or RULES[self.name].variance_reduced,
            f'optimizer.mode has no meaning for optimizer.name = "{self.name}"',
        )
        require(self.lr > 0, f"optimizer.lr must be more than 0, got {self.lr}")
        try:
            resolved = replace(self, **complete_settings(self.name, **self.rule_settings()))
            check_groups(**resolved.settings())
        except ValueError as error:
            raise UserError(f"optimizer.{error}") from None
        return resolved


def optimizer_section(rule: str = OptimizerConfig.name) -> type[OptimizerConfig]:
    """Return the section [optimizer] of a rule. Raises `UserError` if nobody has registered it."""
    try:
        KeyOf(RULES).check(rule)
    except ValueError as error:
        raise UserError(f"optimizer.name {error}") from None
    return _section_with(rule, RULES[rule].config)


@cache
def _section_with(rule: str, settings: type) -> type[OptimizerConfig]:
    """Return [optimizer] with the settings of a rule: a class that derives from both."""
    name = ("name", Annotated[Rule, Mark.IDENTITY], field(default=rule))
    same: dict[str, Any] = {n: getattr(OptimizerConfig, n) for n in ("__module__", "__doc__")}
    same["__reduce__"] = lambda self: (remade, (optimizer_section, rule, vars(self)))
    made: Any = make_dataclass(
        "OptimizerConfig", [name], bases=(settings, OptimizerConfig), frozen=True, namespace=same
    )
    return made


def set_fields(section: GroupConfig | OptimizerConfig) -> dict[str, Any]:
    """Return the fields of a section that are not None."""
    values = {each.name: getattr(section, each.name) for each in fields(section)}
    return {name: value for name, value in values.items() if value is not None}
