"""Which update rule, with which settings for which parameters."""

from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal

from torchmars.config.fields import Amount, Clip, Mark, Positive, require
from torchmars.core.bounds import Range
from torchmars.core.errors import UserError

Rule = Literal["mars-adamw", "mars-lion", "mars-shampoo", "mars-m", "adamw", "lion", "muon"]
MARS_RULES = ("mars-adamw", "mars-lion", "mars-shampoo", "mars-m")
# The fields that `complete_settings` takes and completes.
RULE_SETTINGS = (
    "lr",
    "betas",
    "eps",
    "weight_decay",
    "gamma",
    "clip",
    "optimize_1d",
    "lr_1d",
    "betas_1d",
    "weight_decay_1d",
)
GROUPS = ("matrix", "embedding", "head", "vector")


@dataclass(frozen=True)
class GroupConfig:
    """Settings of one group of parameters, in place of the optimizer's.

    What is not set follows from optimizer.name.
    """

    rule: Rule | None = None
    """Update rule: mars-adamw, mars-lion, mars-shampoo, mars-m, adamw, lion or muon."""
    lr: Amount | None = None
    """Learning rate. It follows the schedule in proportion."""
    betas: tuple[float, float] | None = None
    """Decay of the momentum and of the second moment."""
    weight_decay: Amount | None = None
    """Decoupled weight decay."""
    gamma: Amount | None = None
    """mars-*: strength of the variance reduction."""
    clip: Clip | None = None
    """mars-*: clip each tensor's corrected gradient to this norm. 0 switches it off."""
    split: Positive | None = None
    """Matrix rules: parts that a matrix is cut into by rows before it is orthogonalised. 3 for a
    fused QKV."""


@dataclass(frozen=True)
class PatternConfig(GroupConfig):
    """A group of the parameters whose name matches a pattern."""

    pattern: str = ""
    """Pattern of parameter names, as a shell's: "blocks.*.attn.qkv.weight"."""


@dataclass(frozen=True)
class OptimizerConfig:
    """Which update rule, with which settings.

    Defaults are the published ones for GPT-2 small, where there are any.
    """

    name: Annotated[Rule, Mark.IDENTITY] = "mars-adamw"
    """mars-adamw, mars-lion, mars-shampoo, mars-m: variance-reduced AdamW, Lion, Shampoo and Muon.
    adamw, lion, muon: the same without the reduction. A run prints at its start what embeddings
    and vectors get."""
    lr: Annotated[float, Range(0, 1_000_000, open_low=True)] | None = None
    """Peak learning rate of the matrices. Default: 6e-3 for mars-adamw, mars-m and muon, 2e-2 for
    mars-shampoo (its embeddings get 0.3 of it), 6e-4 for mars-lion and adamw, 1e-4 for lion."""
    betas: tuple[float, float] | None = None
    """Momentum and second-moment decay. Default: 0.95 0.99 for mars-* and muon, 0.9 0.95 for
    adamw, 0.9 0.99 for lion."""
    eps: Amount | None = None
    """Added to the root of the second moment. Default: 1e-8."""
    weight_decay: Amount | None = None
    """Decoupled weight decay. Default: 0.01 for mars-adamw and mars-shampoo, 0.5 for lion, 0.1 for
    the others."""
    gamma: Amount | None = None
    """mars-*: strength of the variance reduction. Default: 0.025. 0.025 to 0.05 works best. For a
    schedule see schedule.gamma."""
    clip: Clip | None = None
    """mars-*: clip each tensor's corrected gradient to this norm. Default: 1. 0 switches it off;
    the rules other than mars-adamw then keep one buffer per parameter."""
    mode: Annotated[Literal["approx", "exact"], Mark.IDENTITY] = "approx"
    """mars-*: which gradient corrects. approx: the last step's. exact: this batch's at the last
    weights, which costs a second forward and backward pass."""
    momentum_dtype: Annotated[Literal["float32", "bfloat16"], Mark.IDENTITY] = "float32"
    """What the momentum is kept in, the first moment of every rule."""
    last_grad_dtype: Annotated[Literal["float32", "bfloat16"], Mark.IDENTITY] = "float32"
    """mars-*: what the last gradient is kept in."""
    matrix_dtype: Literal["auto", "bfloat16", "mixed", "float32"] = "auto"
    """Matrix rules: what matrices are sent to their owners in, and multiplied in. mixed: they are
    multiplied in float32; input and direction are sent in bfloat16. auto: bfloat16 where every
    rank has instructions for it, else mixed. A run keeps what it began with unless this names
    another."""
    overlap: bool = True
    """Matrix rules: let the transfers of matrices overlap with the work on others."""
    optimize_1d: bool | None = None
    """mars-adamw, mars-lion, mars-shampoo: give vectors (norm weights, biases) MARS too, instead
    of AdamW. Default: false."""
    lr_1d: Amount | None = None
    """The same three rules: learning rate of the vectors' AdamW. It follows the schedule in
    proportion. Default: lr / 2, 3e-3 for mars-shampoo."""
    betas_1d: tuple[float, float] | None = None
    """mars-*, muon: betas of AdamW, for vectors and (mars-m, muon) embeddings. Default: 0.9
    0.95."""
    weight_decay_1d: Amount | None = None
    """mars-adamw, mars-lion, mars-shampoo: weight decay of the vectors' AdamW. Default: 0.1."""
    matrix: GroupConfig = field(default_factory=GroupConfig)
    """Hidden matrices."""
    embedding: GroupConfig = field(default_factory=GroupConfig)
    """Token and position embeddings."""
    head: GroupConfig = field(default_factory=GroupConfig)
    """An output layer of its own."""
    vector: GroupConfig = field(default_factory=GroupConfig)
    """Norm weights and biases."""
    groups: list[PatternConfig] = field(default_factory=list)
    """[[optimizer.groups]] tables: parameters by name. The first pattern that matches claims them.
    In TOML only."""

    def settings(self) -> dict[str, Any]:
        """Return the arguments of `param_groups` but the model."""
        given = {role: set_fields(getattr(self, role)) for role in GROUPS}
        patterns = [(group.pattern, set_fields(group)) for group in self.groups]
        return self.rule_settings() | {
            "name": self.name,
            "by_role": {role: changes for role, changes in given.items() if changes},
            "by_pattern": [
                (pattern, {key: value for key, value in changes.items() if key != "pattern"})
                for pattern, changes in patterns
            ],
        }

    def rule_settings(self) -> dict[str, Any]:
        """Return the settings of the rule that are set."""
        return {key: value for key, value in set_fields(self).items() if key in RULE_SETTINGS}

    def resolve(self) -> "ResolvedOptimizer":
        """Return the section with the rule's defaults filled in.

        Raises `UserError` for a value or a setting that the rule cannot take.
        """
        # Here, since it imports torch, which takes seconds.
        from torchmars.optim.param_groups import check_groups, complete_settings

        require(
            self.name in MARS_RULES or self.mode == "approx",
            f'optimizer.mode has no meaning for optimizer.name = "{self.name}"',
        )
        try:
            settings = complete_settings(self.name, **self.rule_settings())
            resolved = ResolvedOptimizer(**vars(self) | settings)
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


def set_fields(section: GroupConfig | OptimizerConfig) -> dict[str, Any]:
    """Return the fields of a section that are not None."""
    values = {each.name: getattr(section, each.name) for each in fields(section)}
    return {name: value for name, value in values.items() if value is not None}
