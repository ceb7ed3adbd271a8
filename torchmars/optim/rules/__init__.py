"""The update rules: one file for each family, and the table of all of them."""

from collections.abc import Iterable

from torchmars.optim.rules.adamw import AdamW, MarsAdamW
from torchmars.optim.rules.lion import Lion, MarsLion
from torchmars.optim.rules.matrix import MarsM, MarsShampoo, Muon
from torchmars.optim.rules.rule import ElementwiseRule, MatrixRule, Rule
from torchmars.optim.settings import Setting

__all__ = [
    "RULES",
    "ElementwiseRule",
    "MatrixRule",
    "Rule",
    "group_settings",
    "state_fits",
    "variance_reduced",
]

RULES: dict[str, Rule] = {
    rule.name: rule
    for rule in (MarsAdamW(), MarsLion(), MarsShampoo(), MarsM(), AdamW(), Lion(), Muon())
}


def variance_reduced(name: str) -> bool:
    """Return whether `name` is a rule that uses the corrected gradient of MARS."""
    return name in RULES and RULES[name].variance_reduced


def group_settings() -> dict[str, Setting]:
    """Return the settings that a parameter group of any rule may have, by name."""
    every = [setting for rule in RULES.values() for setting in rule.settings]
    return {setting.name: setting for setting in every if setting.scope != "optimizer"}


def state_fits(rule: str, wanted: Iterable[str], saved_rule: str, saved: Iterable[str]) -> bool:
    """Return whether `rule` can continue from state of the names `saved` that `saved_rule` left.

    Moving averages mean the same under every rule that keeps them. A lean "momentum" fits its own
    rule only. A last gradient may be missing: the first correction is then left out.
    """
    missing = set(wanted) - set(saved)
    return missing <= {"last_grad"} and ("momentum" not in wanted or rule == saved_rule)
